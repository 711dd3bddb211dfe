"""Image files, upright: single ones, and clips that are a list or a folder of frames."""

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy

from hf_memopt.errors import one_line
from hf_memopt.video.clips import Clip, ClipOutline, FrameBuffer, segment
from hf_memopt.video.frame_limits import FrameLimits
from hf_memopt.video.video_files import BadVideo, FrameTimes, choose_frames, display_name, out_of_host_memory

# Of a folder of frames; others in it (a list of times, a thumbnail database) are no frames.
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # EXIF 2.32, tag Orientation


def open_medium(source, place: Callable[[str], Path]) -> Path | io.BytesIO:
    """The path of a file, or a buffer with the bytes that a dataset embeds.

    Args:
        source: of a Medium that is one file.
        place: the path that a row's name of a file stands for.

    Raises:
        BadVideo: there is no such file.
    """
    if isinstance(source, dict):
        source = source.get("bytes") or source.get("path")
    if isinstance(source, bytes):
        return io.BytesIO(source)
    path = place(source)
    if not path.is_file():
        raise BadVideo(f"{path}: no such file")
    return path


def open_image(source: Path | io.BytesIO):
    """A PIL image in RGB, turned as its EXIF data says.

    Raises:
        BadVideo: it is no image that can be decoded.
        InputError: host memory ran out.
    """
    from PIL import ImageOps

    with _opened(source) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def image_size(source: Path | io.BytesIO) -> tuple[int, int]:
    """Height and width, upright; the picture is not decoded.

    Raises:
        BadVideo: it is no image.
    """
    with _opened(source) as image:
        turned = image.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS
        return (image.width, image.height) if turned else (image.height, image.width)


@contextlib.contextmanager
def _opened(source: Path | io.BytesIO):
    """A PIL image, not decoded yet; errors of a file within this context are BadVideo."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield Image.open(source)
    except MemoryError as error:
        raise out_of_host_memory(source, error) from error
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise BadVideo(f"{display_name(source)}: not a readable image ({one_line(error)})") from error


_RATE = 2.0  # frames per second where a row has no `sample_fps`: as in qwen-vl-utils


def frames_in(folder: Path) -> list[Path]:
    """The frames of a folder in the order of the numbers in their names.

    Raises:
        BadVideo: there are none.
    """
    files = [file for file in folder.iterdir() if file.suffix.lower() in IMAGE_SUFFIXES]
    if not files:
        raise BadVideo(f"{folder}: a folder without frames ({', '.join(IMAGE_SUFFIXES)})")
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
