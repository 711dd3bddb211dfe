"""The batch of a video job for estimates: its tensors without bytes, and how many tokens each part takes."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError, choose
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.frame_limits import capped_size, parse_frame_size
from hf_memopt.video.pixels import FAMILIES, Settings
from hf_memopt.video.processor import TorchVideoProcessor, lower_shortest_edge, read_video_settings

_TEXT_ID = 0  # stands for any token of the text
_VIDEO_TYPE = 2  # of mm_token_type_ids: transformers' ProcessorMixin.create_mm_token_type_ids
_TYPED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")  # models that ask for them
# Elements: floating-point tensors below this are no pixels, and models compute with their values (second_per_grid_ts).
_MAX_VALUE_ELEMENTS = 4096


class ClipShape(NamedTuple):
    """A model's inputs of one clip.

    Attributes:
        tensors: the model's media inputs; pixels are on the meta device.
        steps: in time.
        step_tokens: tokens of each step.
        closing_tokens: tokens after the last step.
        beside: tokens of the text that the processor writes around each step.
    """

    tensors: dict[str, torch.Tensor]
    steps: int
    step_tokens: int
    closing_tokens: int
    beside: int = 0


@dataclass(frozen=True)
class VideoInputs:
    """Clips of one size, each with a question and an answer.

    Attributes:
        frames: of a clip.
        height, width: of a frame in the file, pixels.
        max_pixels_per_frame: height × width after scaling.
        prompt_tokens, answer_tokens: of the text around the clip.
        settings: the checkpoint's video processor settings.
        sample: a real sample; all other fields are then ignored.
        packed: a packed batch as the model takes it, its pixels on the meta device; likewise.
    """

    frames: int = 100
    height: int = 360
    width: int = 640
    max_pixels_per_frame: int | None = None
    prompt_tokens: int = 64
    answer_tokens: int = 64
    settings: Settings = field(default_factory=dict)
    kind: ClassVar[str] = "video"
    sample: dict[str, torch.Tensor] | None = None
    packed: dict[str, torch.Tensor] | None = None

    def batch(self, config, micro_batch: int) -> dict[str, torch.Tensor]:
        """One micro-batch; its pixels are on the meta device."""
        if self.packed is not None:
            return self.packed
        return VideoCollator(0)([self.sample or self._make_sample(config)] * micro_batch)

    def longest(self, config) -> int:
        """Tokens of the longest sample, with padding."""
        tokens = self.batch(config, 1)
        if self.packed is None:
            return tokens["input_ids"].shape[1]
        return int(tokens["position_ids"].view(-1, tokens["input_ids"].shape[1])[0].max()) + 1

    def _make_sample(self, config) -> dict[str, torch.Tensor]:
        tensors, steps, step_tokens, closing_tokens, beside = self.clip(config)
        media_id, media_type = self.place(config)
        step = [_TEXT_ID] * beside + [media_id] * step_tokens
        ids = torch.tensor(
            [_TEXT_ID] * self.prompt_tokens
            + step * steps
            + [media_id] * closing_tokens
            + [_TEXT_ID] * self.answer_tokens
        )
        labels = torch.full_like(ids, IGNORED)
        labels[-self.answer_tokens :] = 1
        sample = {"input_ids": ids, "labels": labels, **tensors}
        if config.model_type in _TYPED:
            sample["mm_token_type_ids"] = (ids == media_id).long() * media_type
        return sample

    def place(self, config) -> tuple[int, int]:
        """The token id that stands for a part of a clip, and its mm_token_type_ids."""
        video_id = getattr(config, "video_token_id", None)
        if video_id is None or config.model_type == "smolvlm":  # whose frames are images to the model
            video_id = config.image_token_id
        return video_id, _VIDEO_TYPE

    def clip(self, config) -> ClipShape:
        """The tensors and tokens of a clip.

        Raises:
            InputError: an unknown model family.
        """
        model_type = config.model_type
        if model_type not in FAMILIES:
            raise choose("video model type", model_type, FAMILIES)
        # Token compression depends on the pixels; without it, memory is an upper bound.
        processor = TorchVideoProcessor(model_type, {**self.settings, "use_token_compression": False})
        lower_shortest_edge(_VideoPart(processor), self.max_pixels_per_frame)
        settings, family = processor.settings, processor.family
        frames = -(-self.frames // processor.temporal_patch_size) * processor.temporal_patch_size
        multiple = settings.get("patch_size", 1) * settings.get("merge_size", 2)
        size = capped_size(self.height, self.width, self.max_pixels_per_frame, multiple)
        size = family.resize_steps(settings, frames, *size)[-1]
        tensors = family.layout(settings, torch.empty(frames, 3, *size, device="meta"))
        return _model_inputs(config, tensors, settings, frames)._replace(beside=family.text_tokens)

    def temporal_patch_size(self, config) -> int:
        """Frames that the model merges into one step in time."""
        return TorchVideoProcessor(config.model_type, self.settings).temporal_patch_size

    def seq_len(self, config) -> int:
        """Tokens of a sample: text, clip, and what the processor writes beside each step."""
        _, steps, step_tokens, closing_tokens, beside = self.clip(config)
        return self.prompt_tokens + self.answer_tokens + (beside + step_tokens) * steps + closing_tokens

    def halved(self) -> "VideoInputs | None":
        """The clip with half the frames; None where that is impossible."""
        real = self.sample is not None or self.packed is not None
        return None if real or self.frames < 2 else replace(self, frames=self.frames // 2)

    def summary(self, config) -> str:
        """One line for people: frames, the pixels that the model sees, tokens."""
        tensors, steps, step_tokens, closing_tokens, _ = self.clip(config)
        tokens = steps * step_tokens + closing_tokens
        return f"{self.frames} frames of {self.width} × {self.height} → {seen_pixels(tensors)} → {tokens:,} tokens"


def seen_pixels(tensors: dict[str, torch.Tensor]) -> str:
    """The pixels that the model sees, for people."""
    pixels = next(tensor for name, tensor in tensors.items() if name.startswith("pixel_values"))
    height, width = pixels.shape[-2:]
    return f"{height:,} patches" if pixels.dim() == 2 else f"{height} × {width} pixels each"


@dataclass
class _VideoPart:
    """A processor without an image processor."""

    video_processor: TorchVideoProcessor
    image_processor: Any = None


def _model_inputs(config, tensors: dict[str, torch.Tensor], settings: Settings, frames: int) -> ClipShape:
    """The tensors that a family's processor makes of its video processor's tensors."""
    if "video_grid_thw" in tensors:
        steps, rows, columns = tensors["video_grid_thw"][0].tolist()
        if config.model_type == "qwen2_5_vl":
            tensors["second_per_grid_ts"] = torch.tensor([1.0])
        return ClipShape(tensors, steps, rows * columns // settings["merge_size"] ** 2, 0)
    if config.model_type == "internvl":
        return ClipShape({"pixel_values": tensors["pixel_values_videos"][0]}, frames, config.image_seq_length, 0)
    side = config.vision_config.image_size // config.vision_config.patch_size
    if config.model_type == "smolvlm":
        return ClipShape(tensors, frames, side**2 // config.scale_factor**2, 0)
    return ClipShape(tensors, frames, math.ceil(side / 2) ** 2, 1)  # LLaVA-OneVision pools 2 × 2, and adds a newline


def video_inputs(model, config, settings: dict[str, Any]) -> VideoInputs | None:
    """VideoInputs from `--set`'s `max_frames`, `frame_size`, `max_pixels_per_frame` and `answer_tokens`.

    Args:
        model: a folder or hub id whose processor settings are read, or a bundled architecture's name.

    Returns:
        None where neither `max_frames` nor `frame_size` is set.

    Raises:
        InputError: an invalid value.
    """
    if not settings.keys() & {"max_frames", "frame_size"}:
        return None
    counts = {
        "max_frames": settings.get("max_frames", VideoInputs.frames),
        "answer_tokens": settings.get("answer_tokens", VideoInputs.answer_tokens),
    }
    at_least_one(counts)
    width, height = parse_frame_size(settings.get("frame_size", f"{VideoInputs.width}x{VideoInputs.height}"))
    video = VideoInputs(
        frames=counts["max_frames"],
        height=height,
        width=width,
        max_pixels_per_frame=settings.get("max_pixels_per_frame"),
        answer_tokens=counts["answer_tokens"],
        settings=read_video_settings(str(model)),
    )
    video.clip(config)  # refuses models that take no videos
    return video


def at_least_one(counts: dict[str, Any]) -> None:
    """Refuse counts that are no positive integers.

    Raises:
        InputError: names the first.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value} must be an integer of at least 1: memory depends on it")


def frozen_by_settings(settings: dict[str, Any]) -> tuple[str, ...]:
    """The parts that are not trained by `freeze_vision` (default true) and `freeze_projector` (default false)."""
    defaults = {"vision": True, "projector": False}
    return tuple(part for part, default in defaults.items() if settings.get(f"freeze_{part}", default))


def value_tensors(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a batch whose values decide shapes in the model: all but pixels."""
    return {
        name: tensor
        for name, tensor in batch.items()
        if tensor.device.type != "meta" and (not tensor.is_floating_point() or tensor.numel() < _MAX_VALUE_ELEMENTS)
    }
