"""The frames of a clip to take, and their size: what a row asks for, within the limits of the run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.data.columns import CLIP_SAMPLING
from hf_memopt.errors import InputError

IMAGE_SAMPLING = ("min_pixels", "max_pixels")
_WHOLE = ("nframes", "min_frames", "max_frames")


@dataclass(frozen=True)
class Sampling:
    """A row's request for one clip; None where the run's own limits hold.

    qwen-vl-utils 0.0.14 (vision_process.py) has the same keys. Its defaults for pixels are not taken over: without
    `min_pixels` and `max_pixels` the checkpoint's processor decides. A run's own limits are never exceeded.

    Attributes:
        fps: frames per second to take.
        nframes: frames to take, rounded to a multiple of what the model merges in time; instead of `fps`.
        min_frames, max_frames: bounds of what `fps` gives.
        min_pixels, max_pixels: height × width of a frame, or of an image.
        total_pixels: of all frames, counted once for each step in time.
        video_start, video_end: seconds; frames outside are not taken.
        sample_fps: frames per second of a clip that is a list or a folder of frames.

    Raises:
        InputError: a value that is no number in range, or `fps` beside `nframes`.
    """

    fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: float | None = None
    max_pixels: float | None = None
    total_pixels: float | None = None
    video_start: float | None = None
    video_end: float | None = None
    sample_fps: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None:
                number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
                if name in _WHOLE and not (number and value == int(value) and value >= 1):
                    raise InputError(f"{name}={value!r} must be an integer of at least 1")
                if not number or value < 0 or (value == 0 and name != "video_start"):
                    raise InputError(f"{name}={value!r} must be a number above 0")
        if self.fps is not None and self.nframes is not None:
            raise InputError(f"fps={self.fps} and nframes={self.nframes}: leave one of them out")
        if self.video_end is not None and self.video_end <= (self.video_start or 0):
            raise InputError(f"video_end={self.video_end} must be above video_start={self.video_start or 0}")

    @classmethod
    def read(cls, outer: Mapping[str, Any], inner: Mapping[str, Any], where: str) -> "Sampling":
        """A clip's sampling: what is said of the clip itself over what its row says.

        Raises:
            InputError: names the row and the value.
        """
        inner = {name: value for name, value in inner.items() if name in CLIP_SAMPLING and value is not None}
        outer = {name: value for name, value in outer.items() if name in CLIP_SAMPLING and value is not None}
        if inner.keys() & {"fps", "nframes"}:
            outer = {name: value for name, value in outer.items() if name not in ("fps", "nframes")}
        try:
            return cls(**{**outer, **inner})
        except InputError as error:
            raise InputError(f"{where}: {error}") from error


# At a rate, so that the shortest clips are not single frames: FPS_MIN_FRAMES of qwen-vl-utils, `min_frames` of
# transformers' Qwen2VLVideoProcessor.
_MIN_FRAMES = 4


@dataclass(frozen=True)
class FrameLimits:
    """Limits of the frames of a file.

    Attributes:
        max_frames: None for no limit.
        fps: frames per second to take; None for all.
        multiple_of: the model's temporal patch size.
        max_pixels: height × width of a frame; larger frames are scaled down, nearly keeping their aspect ratio.
        side_multiple: scaled sides are multiples of this.
        sampling: what the row says of the clip, within these limits.

    Raises:
        InputError: a limit that is not positive.
    """

    max_frames: int | None = 100
    fps: float | None = None
    multiple_of: int = 1
    max_pixels: int | None = None
    side_multiple: int = 2
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        limits = {"max_frames": self.max_frames, "fps": self.fps, "max_pixels_per_frame": self.max_pixels}
        for name, value in limits.items():
            if value is not None and value <= 0:
                raise InputError(f"{name}={value} must be above 0, or None for no limit")

    def count(self, total: int, seconds: float) -> int:
        """Count the frames to take: at least one, at most `max_frames`, rounded down to a multiple of `multiple_of`.

        The rule is that of `smart_nframes` in qwen-vl-utils, which ends with an error where a clip has fewer frames
        than a multiple or than `nframes`; here it keeps all of them.

        Args:
            total: frames of the clip.
            seconds: that the clip lasts.
        """
        sampling, multiple = self.sampling, self.multiple_of
        fps = sampling.fps or self.fps
        if sampling.nframes is not None:
            frames = max(multiple, round(sampling.nframes / multiple) * multiple)
        elif fps is not None:
            smallest = math.ceil((sampling.min_frames or _MIN_FRAMES) / multiple) * multiple
            frames = max(smallest, math.floor(seconds * fps + 1e-6))
        else:
            frames = total
        bounds = (frames, total, self.max_frames, sampling.max_frames)
        count = int(min(bound for bound in bounds if bound is not None))
        return count - count % multiple or count

    def pixel_bounds(self, frames: int) -> tuple[float, float]:
        """The fewest and most pixels of each of so many frames: (0, inf) where nothing limits them."""
        sampling, limits = self.sampling, [self.max_pixels, self.sampling.max_pixels]
        if sampling.total_pixels is not None:
            share = sampling.total_pixels / frames * self.multiple_of
            limits.append(max(share, int((sampling.min_pixels or 0) * 1.05), self.side_multiple**2))
        largest = min((limit for limit in limits if limit is not None), default=math.inf)
        return min(sampling.min_pixels or 0, largest), largest

    def frame_size(self, height: int, width: int, frames: int) -> tuple[int, int]:
        """The (height, width) that each of so many frames is decoded to."""
        smallest, largest = self.pixel_bounds(frames)
        if smallest:
            height, width = smart_resize(height, width, self.side_multiple, smallest, largest)
        return capped_size(height, width, None if largest == math.inf else int(largest), self.side_multiple)


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


def parse_frame_size(text: str, name: str = "frame_size") -> tuple[int, int]:
    """Width and height of "640x360".

    Raises:
        InputError: any other form.
    """
    parts = str(text).lower().replace("×", "x").split("x")
    if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"{name}={text}: write width and height in pixels, as 640x360")
    return int(parts[0]), int(parts[1])
