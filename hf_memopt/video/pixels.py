"""From frames to a model's pixel tensors with torch alone, equal to transformers' video processors bit for bit.

Those need torchvision; here is what they compute, for families whose rules are known. A family is an entry in
FAMILIES: what its configuration says where the checkpoint does not, how large frames become, how they are laid out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hf_memopt.video.clips import within

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_MERGED = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "cap_pixels_per_frame": False}
_MERGED_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
_SQUARE = {"size": {"height": 384, "width": 384}, "resample": 3}
_COMPRESSED_BELOW = 0.1  # VideoLLaMA3 drops patches that change less, as transformers' processor does
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
_LARGEST_SIDE = 4096  # of a frame, SmolVLM

Settings = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How a model's frames are prepared.

    Attributes:
        name: of transformers' video processor.
        defaults: of its configuration.
        sizes: (settings, frames, height, width) -> the sizes that frames are scaled to, one after the other.
        lay_out: (settings, normalised frames) -> the model's tensors for one clip.
        text: tokens that the processor writes beside each step in time (numbers, times, marks).
    """

    name: str
    defaults: Settings
    sizes: Callable[[Settings, int, int, int], list[tuple[int, int]]]
    lay_out: Callable[[Settings, torch.Tensor], dict[str, torch.Tensor]]
    text: int = 0


def pixels_of(family: Family, settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """A clip's tensors, with a leading dimension for the clip where they are not patches.

    Args:
        settings: the checkpoint's configuration of its video processor, over the family's defaults.
        frames: uint8, (frames, 3, height, width).
    """
    for size in family.sizes(settings, len(frames), *frames.shape[-2:]):
        if tuple(frames.shape[-2:]) != size:
            frames = functional.interpolate(frames, size=size, mode=_FILTERS[settings["resample"]], antialias=True)
    return family.lay_out(settings, _normalised(settings, frames))


def _normalised(settings: Settings, frames: torch.Tensor) -> torch.Tensor:
    """(frames × factor − mean) ÷ std, in the order of operations that transformers takes."""
    scale = 1.0 / settings.get("rescale_factor", 1 / 255)
    mean, std = (torch.tensor(settings[name]).view(-1, 1, 1) * scale for name in ("image_mean", "image_std"))
    return frames.to(torch.float32).sub_(mean).div_(std)


def _bounds(settings: Settings) -> tuple[int, int, int]:
    size = settings["size"]
    least = settings.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
    most = settings.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
    return settings["patch_size"] * settings["merge_size"], least, most


def _each_frame_within(settings: Settings, frames: int, height: int, width: int):
    """Qwen2-VL and 2.5: bounds for a frame; with cap_pixels_per_frame, within an even share of the clip's tokens."""
    multiple, least, most = _bounds(settings)
    if settings["cap_pixels_per_frame"]:
        budget = int(settings.get("max_video_tokens", 128_000) * multiple * multiple * 0.9)
        most = max(min(most, budget * settings["temporal_patch_size"] // frames), int(least * 1.05))
    return [within(height, width, multiple, least, most)]


def _clip_within(settings: Settings, frames: int, height: int, width: int):
    """Qwen3-VL: bounds for the pixels of all frames; frames are at least a patch high and wide."""
    multiple, least, most = _bounds(settings)
    if settings["cap_pixels_per_frame"]:
        share = min(settings.get("max_video_tokens", 768) * multiple * multiple, most // frames)
        most = max(share, int(least * 1.05)) * frames
    if height < multiple or width < multiple:
        scale = max(multiple / height, multiple / width)
        height, width = int(height * scale), int(width * scale)
    rounded = round(frames / settings["temporal_patch_size"]) * settings["temporal_patch_size"]
    return [within(height, width, multiple, least, most, frames, rounded)]


def _each_frame_within_share(settings: Settings, frames: int, height: int, width: int):
    """VideoLLaMA3: each frame gets an even share of the clip's upper bound."""
    multiple, least, most = _bounds(settings)
    return [within(height, width, multiple, least, most // frames)]


def _as_configured(settings: Settings, frames: int, height: int, width: int):
    """LLaVA-OneVision and InternVL: one size for all."""
    return [(settings["size"]["height"], settings["size"]["width"])]


def _longest_then_square(settings: Settings, frames: int, height: int, width: int):
    """SmolVLM: the longest side to its bound, then the square that the vision tower takes."""
    side = settings["max_image_size"]["longest_edge"]
    longest = min(_LARGEST_SIDE, settings["size"]["longest_edge"])
    aspect = width / height
    shorter = int(longest / aspect) if aspect >= 1 else int(longest * aspect)
    shorter = max(1, shorter + shorter % 2)
    return [(shorter, longest) if aspect >= 1 else (longest, shorter), (side, side)]


def _patches(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows of patches, those that the model merges side by side: (frames ÷ merged × rows × columns, values)."""
    patch, merge, merged = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
    if missing := -len(frames) % merged:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    times, rows, columns = len(frames) // merged, frames.shape[2] // patch, frames.shape[3] // patch
    parts = frames.view(times, merged, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    parts = parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * rows * columns, -1)
    return {"pixel_values_videos": parts, "video_grid_thw": torch.tensor([[times, rows, columns]])}


def _patches_that_change(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """VideoLLaMA3: patches, and a mask of those merged ones that differ from the frame before; at least one."""
    found = _patches(settings, frames)
    times, rows, columns = found["video_grid_thw"][0].tolist()
    merge = settings["merge_size"]
    kept = torch.ones(times * (rows // merge) * (columns // merge), dtype=torch.bool)
    if settings["use_token_compression"] and times > 1:
        images = found["pixel_values_videos"].view(times, (rows // merge) * (columns // merge), -1)
        change = (images[1:] - images[:-1]).abs().mean(dim=-1) * 255
        mask = torch.cat([torch.ones_like(change[:1], dtype=torch.bool), change > _COMPRESSED_BELOW])
        mask[mask.sum(dim=1) < 1, :1] = True
        kept = mask.flatten()
    return {**found, "video_merge_sizes": torch.tensor([merge]), "video_compression_mask": kept}


def _frames_alone(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values_videos": frames[None]}


def _frames_as_images(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    whole = torch.ones(1, len(frames), *frames.shape[-2:], dtype=torch.int64)
    return {"pixel_values": frames[None], "pixel_attention_mask": whole}


_QWEN2 = Family(
    "Qwen2VLVideoProcessor", {**_MERGED, **_CLIP, "size": _MERGED_SIZE, "resample": 3}, _each_frame_within, _patches
)

FAMILIES = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": Family(
        "Qwen3VLVideoProcessor",
        {
            **_MERGED,
            **_HALF,
            "patch_size": 16,
            "resample": 3,
            "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
        },
        _clip_within,
        _patches,
        text=10,
    ),
    "video_llama_3": Family(
        "VideoLlama3VideoProcessor",
        {
            **_MERGED,
            **_HALF,
            "size": _MERGED_SIZE,
            "resample": 3,
            "temporal_patch_size": 1,
            "use_token_compression": True,
        },
        _each_frame_within_share,
        _patches_that_change,
        text=8,
    ),
    "llava_onevision": Family("LlavaOnevisionVideoProcessor", {**_SQUARE, **_CLIP}, _as_configured, _frames_alone),
    "internvl": Family("InternVLVideoProcessor", {**_SQUARE, **_CLIP}, _as_configured, _frames_alone, text=7),
    "smolvlm": Family(
        "SmolVLMVideoProcessor",
        {**_HALF, "size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}, "resample": 1},
        _longest_then_square,
        _frames_as_images,
        text=12,
    ),
}
