"""Clips that are image files: a list of frames, or a folder of them."""

import re
from dataclasses import replace
from pathlib import Path

import numpy

from hf_memopt.video.clips import Clip, ClipOutline, FrameBuffer, segment
from hf_memopt.video.frame_limits import FrameLimits
from hf_memopt.video.frame_times import FrameTimes, choose_frames
from hf_memopt.video.images import SUFFIXES, image_size, open_image
from hf_memopt.video.video_files import BadVideo

_RATE = 2.0  # frames per second where a row has no `sample_fps`: as in qwen-vl-utils


def frames_in(folder: Path) -> list[Path]:
    """The frames of a folder in the order of the numbers in their names.

    Raises:
        BadVideo: there are none.
    """
    files = [file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES]
    if not files:
        raise BadVideo(f"{folder}: a folder without frames ({', '.join(SUFFIXES)})")
    return sorted(files, key=_natural)


def read_frames(files: list[Path], limits: FrameLimits) -> Clip:
    """All frames, or fewer where `max_frames` or the row says so.

    Raises:
        BadVideo: a file is missing, no image, or of another size than the first.
        InputError: more frames than host memory holds.
    """
    times, chosen = _choose(files, limits)
    indices = [times.first + position for position in chosen]
    buffer = FrameBuffer(str(files[0].parent), len(indices), limits)
    for index in indices:
        image = open_image(files[index])
        height, width = limits.frame_size(image.height, image.width, len(indices))
        if buffer.frames is None:
            buffer.check_host_memory(image.height, image.width)
        buffer.add(numpy.asarray(image.resize((width, height)) if image.size != (width, height) else image))
    timestamps = tuple(times.seconds[position] for position in chosen)
    return Clip(buffer.frames, tuple(indices), timestamps, len(times.seconds), times.duration)


def outline_frames(files: list[Path], limits: FrameLimits) -> ClipOutline:
    """The frames that read_frames() would return, from the first one's size.

    Raises:
        BadVideo: the first file is missing, or no image.
    """
    times, chosen = _choose(files, limits)
    size = limits.frame_size(*image_size(files[0]), len(chosen))
    return ClipOutline(len(chosen), *size, len(times.seconds), 1 / times.last_duration)


def _choose(files: list[Path], limits: FrameLimits) -> tuple[FrameTimes, list[int]]:
    """When frames are shown, and which to take: `--video_fps` is of video files, and these are already sampled."""
    rate = limits.sampling.sample_fps or _RATE
    times = FrameTimes([index / rate for index in range(len(files))], None, [], 1 / rate)
    times = segment(files[0].parent, times, limits)
    limits = replace(limits, fps=None)
    padded = -(-len(times.seconds) // limits.multiple_of) * limits.multiple_of
    if limits.max_frames is None or padded <= limits.max_frames:
        limits = replace(limits, multiple_of=1)  # the last frame is repeated, none is dropped
    return times, choose_frames(times, limits)


def _natural(file: Path) -> list:
    """frame2 comes before frame10."""
    parts = re.split(r"(\d+)", file.name)
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]
