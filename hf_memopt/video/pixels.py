"""Video preprocessing of known model families, with torch alone and bit for bit as in transformers' video processors.

Two users cannot have transformers' own, which import torchvision. The estimator computes frame sizes, token counts and
tensor shapes (on the meta device) on machines that only plan a run. And for torch builds that no torchvision wheel
matches (CPU builds with PyPI's wheels, vendor builds, nightlies), installing torchvision breaks `import transformers`
itself. tests/video/test_video_parity.py compares every family with transformers.

A new family is an entry in FAMILIES: default settings, frame sizes, tensor layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from hf_memopt.video.frame_limits import smart_resize

_CLIP_NORMALIZATION = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF_NORMALIZATION = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_PATCHES = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "cap_pixels_per_frame": False}
_PATCHES_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}
_SQUARE = {"size": {"height": 384, "width": 384}, "resample": 3}
# VideoLLaMA3 drops patches that change less between frames (threshold in video_processing_video_llama_3.py).
_COMPRESSION_THRESHOLD = 0.1
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL.Image.Resampling -> mode of interpolate()
_LARGEST_SIDE = 4096  # MAX_IMAGE_SIZE in video_processing_smolvlm.py

Settings = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """The preparation of a model's frames.

    Attributes:
        processor: class name of transformers' video processor.
        defaults: of the processor's settings.
        resize_steps: (settings, frames, height, width) -> the sizes that frames are scaled to, one after the other.
        layout: (settings, normalized frames) -> the model's tensors for one clip.
        text_tokens: tokens that the processor writes beside each step in time (timestamps, markers).
    """

    processor: str
    defaults: Settings
    resize_steps: Callable[[Settings, int, int, int], list[tuple[int, int]]]
    layout: Callable[[Settings, torch.Tensor], dict[str, torch.Tensor]]
    text_tokens: int = 0


def prepare_frames(family: Family, settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model's tensors for one clip, with a leading batch dimension unless they are patches.

    Args:
        settings: the checkpoint's video processor settings, over the family's defaults.
        frames: uint8, (frames, 3, height, width).
    """
    for size in family.resize_steps(settings, len(frames), *frames.shape[-2:]):
        if tuple(frames.shape[-2:]) != size:
            frames = functional.interpolate(frames, size=size, mode=_FILTERS[settings["resample"]], antialias=True)
    # (frames × factor − mean) ÷ std, in the order of operations of transformers, for equal bits.
    scale = 1.0 / settings.get("rescale_factor", 1 / 255)
    mean, std = (torch.tensor(settings[name]).view(-1, 1, 1) * scale for name in ("image_mean", "image_std"))
    return family.layout(settings, frames.to(torch.float32).sub_(mean).div_(std))


def _bounds(settings: Settings) -> tuple[int, int, int]:
    """The multiple of frame sides, and the bounds of the pixels."""
    size = settings["size"]
    min_pixels = size.get("shortest_edge") or size.get("min_pixels")
    max_pixels = size.get("longest_edge") or size.get("max_pixels")
    return settings["patch_size"] * settings["merge_size"], min_pixels, max_pixels


def _frame_bounds(settings: Settings, frames: int, height: int, width: int):
    """Qwen2-VL and 2.5: bounds per frame; with cap_pixels_per_frame, also an equal share of the clip's tokens."""
    multiple, min_pixels, max_pixels = _bounds(settings)
    if settings["cap_pixels_per_frame"]:
        budget = int(settings.get("max_video_tokens", 128_000) * multiple * multiple * 0.9)
        max_pixels = max(min(max_pixels, budget * settings["temporal_patch_size"] // frames), int(min_pixels * 1.05))
    return [smart_resize(height, width, multiple, min_pixels, max_pixels)]


def _clip_bounds(settings: Settings, frames: int, height: int, width: int):
    """Qwen3-VL: bounds on the pixels of all frames; a frame is at least one patch high and wide."""
    multiple, min_pixels, max_pixels = _bounds(settings)
    if settings["cap_pixels_per_frame"]:
        share = min(settings.get("max_video_tokens", 768) * multiple * multiple, max_pixels // frames)
        max_pixels = max(share, int(min_pixels * 1.05)) * frames
    if height < multiple or width < multiple:
        scale = max(multiple / height, multiple / width)
        height, width = int(height * scale), int(width * scale)
    rounded = round(frames / settings["temporal_patch_size"]) * settings["temporal_patch_size"]
    return [smart_resize(height, width, multiple, min_pixels, max_pixels, frames, rounded)]


def _frame_share(settings: Settings, frames: int, height: int, width: int):
    """VideoLLaMA3: each frame gets an equal share of the clip's upper bound."""
    multiple, min_pixels, max_pixels = _bounds(settings)
    return [smart_resize(height, width, multiple, min_pixels, max_pixels // frames)]


def _fixed_size(settings: Settings, frames: int, height: int, width: int):
    """LLaVA-OneVision and InternVL: one size for all clips."""
    return [(settings["size"]["height"], settings["size"]["width"])]


def _longest_then_square(settings: Settings, frames: int, height: int, width: int):
    """SmolVLM: scale the longest side to its bound, then to the vision tower's square."""
    side = settings["max_image_size"]["longest_edge"]
    longest = min(_LARGEST_SIDE, settings["size"]["longest_edge"])
    aspect = width / height
    shorter = int(longest / aspect) if aspect >= 1 else int(longest * aspect)
    shorter = max(1, shorter + shorter % 2)
    return [(shorter, longest) if aspect >= 1 else (longest, shorter), (side, side)]


def _patches(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """Flattened patches, (steps × rows × columns, values); patches that the model merges are adjacent."""
    patch, merge, temporal = settings["patch_size"], settings["merge_size"], settings["temporal_patch_size"]
    if missing := -len(frames) % temporal:
        frames = torch.cat([frames, frames[-1:].expand(missing, -1, -1, -1)])
    steps, rows, columns = len(frames) // temporal, frames.shape[2] // patch, frames.shape[3] // patch
    patches = frames.view(steps, temporal, 3, rows // merge, merge, patch, columns // merge, merge, patch)
    patches = patches.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(steps * rows * columns, -1)
    return {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([[steps, rows, columns]])}


def _compressed_patches(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    """VideoLLaMA3: patches, and a mask of the merged ones that differ from the previous frame; one a frame stays."""
    tensors = _patches(settings, frames)
    steps, rows, columns = tensors["video_grid_thw"][0].tolist()
    merge = settings["merge_size"]
    differs = torch.ones(steps * (rows // merge) * (columns // merge), dtype=torch.bool)
    if settings["use_token_compression"] and steps > 1:
        images = tensors["pixel_values_videos"].view(steps, (rows // merge) * (columns // merge), -1)
        change = (images[1:] - images[:-1]).abs().mean(dim=-1) * 255
        mask = torch.cat([torch.ones_like(change[:1], dtype=torch.bool), change > _COMPRESSION_THRESHOLD])
        mask[mask.sum(dim=1) < 1, :1] = True
        differs = mask.flatten()
    return {**tensors, "video_merge_sizes": torch.tensor([merge]), "video_compression_mask": differs}


def _frames(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pixel_values_videos": frames[None]}


def _frames_as_images(settings: Settings, frames: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, len(frames), *frames.shape[-2:], dtype=torch.int64)
    return {"pixel_values": frames[None], "pixel_attention_mask": mask}


_QWEN2 = Family(
    "Qwen2VLVideoProcessor",
    {**_PATCHES, **_CLIP_NORMALIZATION, "size": _PATCHES_SIZE, "resample": 3},
    _frame_bounds,
    _patches,
)

_QWEN3 = Family(
    "Qwen3VLVideoProcessor",
    {
        **_PATCHES,
        **_HALF_NORMALIZATION,
        "patch_size": 16,
        "resample": 3,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    },
    _clip_bounds,
    _patches,
    text_tokens=10,
)

FAMILIES = {
    "qwen2_vl": _QWEN2,
    "qwen2_5_vl": _QWEN2,
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "video_llama_3": Family(
        "VideoLlama3VideoProcessor",
        {
            **_PATCHES,
            **_HALF_NORMALIZATION,
            "size": _PATCHES_SIZE,
            "resample": 3,
            "temporal_patch_size": 1,
            "use_token_compression": True,
        },
        _frame_share,
        _compressed_patches,
        text_tokens=8,
    ),
    "llava_onevision": Family(
        "LlavaOnevisionVideoProcessor", {**_SQUARE, **_CLIP_NORMALIZATION}, _fixed_size, _frames
    ),
    "internvl": Family(
        "InternVLVideoProcessor", {**_SQUARE, **_CLIP_NORMALIZATION}, _fixed_size, _frames, text_tokens=7
    ),
    "smolvlm": Family(
        "SmolVLMVideoProcessor",
        {
            **_HALF_NORMALIZATION,
            "size": {"longest_edge": 4 * 364},
            "max_image_size": {"longest_edge": 364},
            "resample": 1,
        },
        _longest_then_square,
        _frames_as_images,
        text_tokens=12,
    ),
}
