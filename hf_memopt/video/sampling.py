"""The frames of one clip that a row asks for, and their size, in the spellings of qwen-vl-utils."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
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
                _check(name, value)
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


def _check(name: str, value) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name in _WHOLE and not (number and value == int(value) and value >= 1):
        raise InputError(f"{name}={value!r} must be an integer of at least 1")
    if not number or value < 0 or (value == 0 and name != "video_start"):
        raise InputError(f"{name}={value!r} must be a number above 0")
