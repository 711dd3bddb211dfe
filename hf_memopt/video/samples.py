"""Rows as a dataset of samples: decoded when they are asked for, or outlined from their files' headers alone."""

import copy
import logging
import math
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
import torch

from hf_memopt.data.columns import row_number
from hf_memopt.data.row_files import Place
from hf_memopt.errors import InputError, one_line
from hf_memopt.video.clips import Clip
from hf_memopt.video.conversations import Medium
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.images import image_size
from hf_memopt.video.media import EncodedMedium, MediaEncoder
from hf_memopt.video.pixels import FAMILIES
from hf_memopt.video.processor import TorchVideoProcessor
from hf_memopt.video.video_files import BadVideo


class BadVideos:
    """Bad files, listed in a text file that all processes and data loader workers of a run share.

    Args:
        path: of the list, written with its first line.
        max_bad_videos: how many files may be skipped.
    """

    def __init__(self, path: str | Path, max_bad_videos: int = 0) -> None:
        self.path, self.max_bad_videos = Path(path), max_bad_videos

    def listed(self) -> list[str]:
        """One line per bad file: its name and what is wrong with it."""
        return list(dict.fromkeys(self.path.read_text(encoding="utf-8").splitlines())) if self.path.exists() else []

    def skip(self, error: BadVideo) -> None:
        """List a bad file.

        Raises:
            BadVideo: it is one more than may be skipped.
        """
        line = one_line(error)
        listed = self.listed()
        if line in listed:
            return
        if len(listed) >= self.max_bad_videos:
            earlier = f"; {len(listed)} before it already reach max_bad_videos={self.max_bad_videos}" if listed else ""
            raise BadVideo(f"{line}{earlier}. Remove it from the data, or raise max_bad_videos to skip it") from error
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        logger.warning("skipped: %s", line)


class VideoSamples(torch.utils.data.Dataset):
    """A row without a decodable video is replaced by the next row.

    Args:
        rows: a sequence of rows in the forms that conversation() takes.
        encode: rows -> samples.
        bad: counts files without decodable frames; by default none is allowed.
        name: what messages call a row, "SOURCE: KIND".
    """

    def __init__(self, rows, encode: Encoder, bad: BadVideos | None = None, name: str = "row") -> None:
        self.rows, self.encode, self.name = rows, encode, name
        self.bad = bad or BadVideos("bad_videos.txt")
        self._lengths: list[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> Place | str:
        """Name a row as messages do."""
        source, _, kind = self.name.rpartition(": ")
        number = row_number(getattr(self.rows, "_indices", None), index)
        return Place(source, number, kind=kind) if source else f"{kind} {number}"

    def sizes(self, max_rows: float = math.inf) -> list[float]:
        """Roughly the pixels of each row's videos, from the files' headers; 0 beyond `max_rows` and for bad files.

        Raises:
            BadVideo: more bad files than allowed.
        """
        return [self._estimate_pixels(index) if index < max_rows else 0.0 for index in range(len(self))]

    def _estimate_pixels(self, index: int) -> float:
        try:
            _, media = self.encode.read(self.rows[index], self.where(index))
            return float(sum(self.encode.media.outline(medium).pixels for medium in media if medium.kind == "video"))
        except BadVideo as error:
            self.bad.skip(error)
            return 0.0

    def lengths(self) -> list[int]:
        """Tokens of each row's sample, from its files' headers; of a bad file's row, those of the row in its place.

        Raises:
            BadVideo: more bad files than allowed.
            InputError: the model's family has no such counts, or a row's prompt is too long.
        """
        if self._lengths is None:
            encode, count = outline_encoder(self.encode), len(self)
            lengths = [self._length(encode, index) for index in range(count)]
            for index in reversed(range(2 * count)):  # twice, since the first row follows the last
                if lengths[index % count] is None:
                    lengths[index % count] = lengths[(index + 1) % count]
            if None in lengths:
                raise self._nothing_left()
            self._lengths = lengths
        return self._lengths

    def _length(self, encode: Encoder, index: int) -> int | None:
        try:
            return len(encode(self.rows[index], self.where(index))["input_ids"])
        except BadVideo as error:
            self.bad.skip(error)
            return None

    def outline(self, index: int) -> dict[str, torch.Tensor]:
        """The outline of `self[index]`, from the files' headers: its pixels are on the meta device."""
        return self._make(outline_encoder(self.encode), index)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} {index} of {len(self)}")
        return self._make(self.encode, index)

    def _make(self, encode: Encoder, index: int) -> dict[str, torch.Tensor]:
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            try:
                return encode(self.rows[candidate], self.where(candidate))
            except BadVideo as error:
                self.bad.skip(error)
        raise self._nothing_left()

    def _nothing_left(self) -> BadVideo:
        return BadVideo(f"none of the {len(self)} rows has a video that can be decoded")


logger = logging.getLogger(__name__)


def outline_encoder(encode: Encoder) -> Encoder:
    """An encoder that makes of each row the sample that `encode` makes, with the pixels' shapes alone.

    Raises:
        InputError: the model's family is not one of FAMILIES, so that token counts are known from its own processor
            alone, which needs the pixels.
    """
    media, processor = encode.media, copy.copy(encode.processor)
    if isinstance(processor.video_processor, TorchVideoProcessor):
        name, settings = processor.video_processor.family.processor, processor.video_processor.settings
    else:
        name, settings = type(processor.video_processor).__name__, processor.video_processor.to_dict()
    model_type = next((key for key, family in FAMILIES.items() if family.processor == name), None)
    if model_type is None:
        raise InputError(
            f"{name}: how many tokens a video takes is not known before it is decoded; leave packing, "
            "max_tokens_per_batch and train_sampling_strategy out"
        )
    # Compression depends on the pixels; without it, tokens are an upper bound.
    processor.video_processor = ShapeProcessor(model_type, {**settings, "use_token_compression": False})
    outline = copy.copy(encode)
    # Of a frozen dataclass.
    object.__setattr__(outline, "media", OutlineEncoder(processor, media.limits, media.folder, media.downloads))
    return outline


class ShapeProcessor(TorchVideoProcessor):
    """A family's video processor, for shapes alone."""

    def prepare(self, frames) -> dict[str, torch.Tensor]:
        size = self.family.resize_steps(self.settings, len(frames), *frames.shape[-2:])[-1]
        return self.family.layout(self.settings, torch.empty(len(frames), 3, *size, device="meta"))


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
            # A blank image of the same size: its text depends on nothing else.
            from PIL import Image

            height, width = image_size(self.open_source(medium.source))
            size = self._frame_limits(medium).frame_size(height, width, 1)
            if size not in self.images:
                encoded = self._process("image", 0, images=[Image.new("RGB", size[::-1])])
                shapes = {
                    name: value.to("meta") if value.is_floating_point() else value
                    for name, value in encoded.tensors.items()
                }
                self.images[size] = replace(encoded, tensors=shapes)
            return self.images[size]
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
