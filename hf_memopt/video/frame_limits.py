"""Limits of a clip: how many frames to take, and how large."""

import math
from dataclasses import dataclass, field

from hf_memopt.errors import InputError
from hf_memopt.video.frame_sizes import capped_size, smart_resize
from hf_memopt.video.sampling import Sampling

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
        return count - count % multiple if count >= multiple else count

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
