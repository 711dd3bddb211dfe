"""Samples from their files' headers alone: tokens as they will be, pixels on the meta device, nothing decoded."""

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy
import torch

from hf_memopt.errors import InputError
from hf_memopt.video.clips import Clip
from hf_memopt.video.conversations import Medium
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.images import image_size
from hf_memopt.video.media import EncodedMedium, MediaEncoder
from hf_memopt.video.pixels import FAMILIES
from hf_memopt.video.processor import TorchVideoProcessor


def outline_encoder(encode: Encoder) -> Encoder:
    """An encoder that makes of each row the sample that `encode` makes, with the pixels' shapes alone.

    Raises:
        InputError: the model's family is not one of FAMILIES, so that token counts are known from its own processor
            alone, which needs the pixels.
    """
    media, processor = encode.media, copy.copy(encode.processor)
    processor.video_processor = _shape_processor(processor.video_processor)
    outline = copy.copy(encode)
    shapes = OutlineEncoder(processor, media.limits, media.folder, media.downloads)
    object.__setattr__(outline, "media", shapes)  # of a frozen dataclass
    return outline


def _shape_processor(processor) -> "ShapeProcessor":
    if isinstance(processor, TorchVideoProcessor):
        name, settings = processor.family.processor, processor.settings
    else:
        name, settings = type(processor).__name__, processor.to_dict()
    model_type = next((key for key, family in FAMILIES.items() if family.processor == name), None)
    if model_type is None:
        raise InputError(
            f"{name}: how many tokens a video takes is not known before it is decoded; leave packing, "
            "max_tokens_per_batch and train_sampling_strategy out"
        )
    # Compression depends on the pixels; without it, tokens are an upper bound.
    return ShapeProcessor(model_type, {**settings, "use_token_compression": False})


class ShapeProcessor(TorchVideoProcessor):
    """A family's video processor, for shapes alone."""

    def __call__(self, videos, video_metadata, **_) -> dict[str, Any]:
        from transformers.video_utils import VideoMetadata

        (frames,), (metadata,) = videos, video_metadata
        size = self.family.resize_steps(self.settings, len(frames), *frames.shape[-2:])[-1]
        tensors = self.family.layout(self.settings, torch.empty(len(frames), 3, *size, device="meta"))
        return {**tensors, "video_metadata": [VideoMetadata(**metadata)]}


@dataclass(frozen=True)
class _Outline(Clip):
    """A clip whose `frames` are placeholders, as many as there are; `height` and `width` are the real ones'."""

    height: int = 0
    width: int = 0


@dataclass(frozen=True)
class OutlineEncoder(MediaEncoder):
    """A MediaEncoder that reads headers."""

    images: dict[tuple[int, int], EncodedMedium] = field(default_factory=dict)

    def decode(self, medium: Medium) -> Clip | EncodedMedium:
        if medium.kind == "image":
            return self._image(medium)
        outline = self.outline(medium)
        indices = numpy.linspace(0, outline.total - 1, outline.frames).round().astype(int).tolist()
        seconds = tuple(index / outline.rate for index in indices)
        counted = numpy.zeros(outline.frames, numpy.uint8)
        size = outline.height, outline.width
        return _Outline(counted, tuple(indices), seconds, outline.total, outline.total / outline.rate, *size)

    def encode(self, decoded: Clip | EncodedMedium, max_frames: int | None) -> EncodedMedium:
        if isinstance(decoded, EncodedMedium):
            return decoded
        clip = decoded.thinned(max_frames, self.temporal_patch_size)
        shape = (len(clip.frames), 3, clip.height, clip.width)
        blank = numpy.lib.stride_tricks.as_strided(numpy.zeros(1, numpy.uint8), shape, (0, 0, 0, 0))  # takes one byte
        return self._encode_clip(replace(clip, frames=blank))

    def _image(self, medium: Medium) -> EncodedMedium:
        """A blank image of the same size: its text depends on nothing else."""
        from PIL import Image

        height, width = image_size(self.open_source(medium.source))
        size = self._frame_limits(medium, self.limits.max_frames).frame_size(height, width, 1)
        if size not in self.images:
            encoded = self._process("image", 0, images=[Image.new("RGB", size[::-1])])
            shapes = {
                name: value.to("meta") if value.is_floating_point() else value
                for name, value in encoded.tensors.items()
            }
            self.images[size] = replace(encoded, tensors=shapes)
        return self.images[size]
