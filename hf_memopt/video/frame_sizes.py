"""Frame sizes under a pixel limit."""

import math

from hf_memopt.errors import InputError


def capped_size(height: int, width: int, max_pixels: int | None, multiple: int) -> tuple[int, int]:
    """The (height, width) to decode a frame to.

    Unchanged unless its pixels, or those of its sides rounded to `multiple`, exceed the cap.
    """
    if max_pixels is None:
        return height, width
    rounded = [round(side / multiple) * multiple for side in (height, width)]
    if max(height * width, rounded[0] * rounded[1]) <= max_pixels:
        return height, width
    high, wide = smart_resize(height, width, multiple, 0, max_pixels)
    # smart_resize keeps at least one multiple per side, which can leave an extremely long frame above the cap.
    longest = max(multiple, max_pixels // min(high, wide) // multiple * multiple)
    return min(high, longest), min(wide, longest)


def smart_resize(
    height: int,
    width: int,
    multiple: int,
    min_pixels: float,
    max_pixels: float,
    frames: int = 1,
    rounded_frames: int = 1,
) -> tuple[int, int]:
    """The (height, width) in multiples of `multiple` whose pixels lie between the bounds.

    The formula of `smart_resize` in transformers' models/qwen2_vl/image_processing_qwen2_vl.py (one frame) and
    models/qwen3_vl/video_processing_qwen3_vl.py (bounds shared by all frames).

    Args:
        frames: frames that share the bounds.
        rounded_frames: `frames` rounded to whole temporal patches.
    """
    high, wide = (round(side / multiple) * multiple for side in (height, width))
    if rounded_frames * high * wide > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        high, wide = (max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width))
    elif rounded_frames * high * wide < min_pixels:
        stretch = math.sqrt(min_pixels / (frames * height * width))
        high, wide = (math.ceil(side * stretch / multiple) * multiple for side in (height, width))
    return high, wide


def parse_frame_size(text: str) -> tuple[int, int]:
    """Width and height of "640x360".

    Raises:
        InputError: any other form.
    """
    parts = str(text).lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"frame_size={text}: write width and height in pixels, as 640x360")
    return int(parts[0]), int(parts[1])
