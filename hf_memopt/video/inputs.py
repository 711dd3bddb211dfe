"""The batch of a video job, from its settings or from a sample: its tensors, and how many tokens each part takes."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError, choose
from hf_memopt.video.clips import capped_size
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.pixels import FAMILIES, Settings
from hf_memopt.video.processor import FramesToPixels, settings_of
from hf_memopt.video.samples import cap_pixels

_VIDEO, _TEXT, _FEW = 2, 0, 4096  # elements: of what is no pixels


@dataclass(frozen=True)
class VideoInputs:
    """Clips of one size, each with a question and an answer.

    Attributes:
        frames: of a clip.
        height, width: of a frame in the file, pixels.
        max_pixels_per_frame: height × width that a frame keeps.
        prompt_tokens, answer_tokens: of the text around the clip.
        settings: the checkpoint's configuration of its video processor.
        sample: a genuine one, in place of all that.
    """

    frames: int = 100
    height: int = 360
    width: int = 640
    max_pixels_per_frame: int | None = None
    prompt_tokens: int = 64
    answer_tokens: int = 64
    settings: Settings = field(default_factory=dict)
    sample: dict[str, torch.Tensor] | None = None

    def batch(self, config, micro_batch: int) -> dict[str, torch.Tensor]:
        """One micro-batch; its pixels have a shape alone."""
        sample = self.sample or self._made(config)
        return VideoCollator(0)([sample] * micro_batch)

    def _made(self, config) -> dict[str, torch.Tensor]:
        media, steps, per_step, closing = self.clip(config)
        family = FAMILIES[config.model_type]
        place = getattr(config, "video_token_id", None)
        place = config.image_token_id if place is None or config.model_type == "smolvlm" else place
        step = [_TEXT] * family.text + [place] * per_step
        ids = [_TEXT] * self.prompt_tokens + step * steps + [place] * closing + [_TEXT] * self.answer_tokens
        ids = torch.tensor(ids)
        labels = torch.full_like(ids, IGNORED)
        labels[-self.answer_tokens :] = 1
        sample = {"input_ids": ids, "labels": labels, **media}
        if config.model_type in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
            sample["mm_token_type_ids"] = (ids == place).long() * _VIDEO
        return sample

    def clip(self, config) -> tuple[dict[str, torch.Tensor], int, int, int]:
        """A clip's tensors, its steps in time, the tokens of each, and tokens that close it.

        Raises:
            InputError: a family that is not known.
        """
        kind = config.model_type
        if kind not in FAMILIES:
            raise choose("video model type", kind, FAMILIES)
        processor = FramesToPixels(kind, self.settings)
        settings = processor.settings = {**processor.settings, "use_token_compression": False}
        cap_pixels(_Only(processor), self.max_pixels_per_frame)
        settings = processor.settings
        merged = processor.temporal_patch_size
        frames = -(-self.frames // merged) * merged
        multiple = settings.get("patch_size", 1) * settings.get("merge_size", 2)
        size = capped_size(self.height, self.width, self.max_pixels_per_frame, multiple)
        size = processor.family.sizes(settings, frames, *size)[-1]
        tensors = processor.family.lay_out(settings, torch.empty(frames, 3, *size, device="meta"))
        return _taken(config, tensors, settings, frames)

    def merged(self, config) -> int:
        """Frames that the model merges in time."""
        return FramesToPixels(config.model_type, self.settings).temporal_patch_size

    def text_tokens(self, config, steps: int) -> int:
        """Tokens around a clip, and those that the processor writes at each step."""
        return self.prompt_tokens + self.answer_tokens + FAMILIES[config.model_type].text * steps

    def halved(self) -> "VideoInputs | None":
        """With half the frames; None where that cannot be."""
        return replace(self, frames=self.frames // 2) if self.sample is None and self.frames > 1 else None

    def summary(self, config) -> str:
        """The clip in words: frames, the pixels that the model sees, tokens."""
        media, steps, per_step, closing = self.clip(config)
        patches = next(value for name, value in media.items() if name.startswith("pixel_values"))
        rows = (
            f"{patches.shape[0]:,} patches"
            if patches.dim() == 2
            else f"{patches.shape[-2]} × {patches.shape[-1]} pixels each"
        )
        return f"{self.frames} frames of {self.width} × {self.height} → {rows} → {steps * per_step + closing:,} tokens"


@dataclass
class _Only:
    """A processor that has a video part alone."""

    video_processor: FramesToPixels
    image_processor: Any = None


def _taken(config, tensors: dict, settings: Settings, frames: int):
    """What the processor of a family makes of its clip's tensors, and the tokens that the model sees."""
    kind = config.model_type
    if "video_grid_thw" in tensors:
        steps, rows, columns = tensors["video_grid_thw"][0].tolist()
        if kind == "qwen2_5_vl":
            tensors["second_per_grid_ts"] = torch.tensor([1.0])
        return tensors, steps, rows * columns // settings["merge_size"] ** 2, 0
    if kind == "internvl":
        return {"pixel_values": tensors["pixel_values_videos"][0]}, frames, config.image_seq_length, 0
    vision = config.vision_config
    side = vision.image_size // vision.patch_size
    if kind == "smolvlm":
        return tensors, frames, side**2 // config.scale_factor**2, 0
    return tensors, frames, math.ceil(side / 2) ** 2, 1


def video_inputs(model, config, given: dict[str, Any]) -> VideoInputs | None:
    """What `max_frames`, `frame_size`, `max_pixels_per_frame` and `answer_tokens` say; None where they say nothing.

    Args:
        model: a folder or hub id whose processor is asked, or a bundled architecture's name.

    Raises:
        InputError: a value that cannot be.
    """
    if not given.keys() & {"max_frames", "frame_size"}:
        return None
    frames = given.get("max_frames", VideoInputs.frames)
    numbers = {"max_frames": frames, "answer_tokens": given.get("answer_tokens", VideoInputs.answer_tokens)}
    for name, value in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value} must be a number of at least 1: how many there are decides the memory")
    width, height = frame_size(given.get("frame_size", f"{VideoInputs.width}x{VideoInputs.height}"))
    video = VideoInputs(
        frames=frames,
        height=height,
        width=width,
        max_pixels_per_frame=given.get("max_pixels_per_frame"),
        answer_tokens=numbers["answer_tokens"],
        settings=settings_of(str(model)),
    )
    video.clip(config)  # a model that sees nothing is refused here
    return video


def frozen_as_said(given: dict[str, Any]) -> tuple[str, ...]:
    """The parts that are not trained: the vision tower, unless something else is said."""
    return tuple(
        part for part, usual in (("vision", True), ("projector", False)) if given.get(f"freeze_{part}", usual)
    )


def frame_size(text: str) -> tuple[int, int]:
    """Width and height of "640x360".

    Raises:
        InputError: it is not written so.
    """
    parts = str(text).lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"frame_size={text}: write width and height in pixels, as 640x360")
    return int(parts[0]), int(parts[1])


def values_of(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a batch that a model asks for their values: all but pixels."""
    return {
        name: tensor
        for name, tensor in batch.items()
        if tensor.device.type != "meta" and (not tensor.is_floating_point() or tensor.numel() < _FEW)
    }
