"""Frames of a video file: only the chosen ones, evenly spaced over all of it, never more than a limit."""

import errno
import io
import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy

from hf_memopt.errors import InputError, one_line

_THREADS = 4  # of a decoder, which hold a frame each and more; data loaders have several decoders
_HOST_SHARE = 0.5  # of free host memory that a clip's frames may take: their tensors and other workers need some too
_MIB = 2**20
_STEADY = 0.3  # of a frame's duration: how far containers round the times of frames that are evenly spaced


class BadVideo(InputError):
    """A file gives no frames; the message begins with its name."""


@dataclass(frozen=True)
class Clip:
    """Chosen frames of a video.

    Attributes:
        frames: uint8, (frames, 3, height, width).
        indices: of the chosen frames among all.
        timestamps: seconds from the first frame.
        total: frames that the file has.
        duration: seconds.
    """

    frames: numpy.ndarray
    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    total: int
    duration: float

    @property
    def rate(self) -> float:
        """Frames per second of the file, on average."""
        return self.total / self.duration


def frame_count(
    total: int, duration: float, max_frames: int | None = None, fps: float | None = None, multiple_of: int = 1
) -> int:
    """How many frames are taken: min(max_frames, total, duration × fps), at least one, rounded down.

    Args:
        duration: seconds.
        multiple_of: frames that a model merges in time; a clip with fewer keeps what it has.
    """
    wanted = total if fps is None else max(1, math.floor(duration * fps + 1e-6))
    count = min(total, wanted, total if max_frames is None else max_frames)
    return count - count % multiple_of if count >= multiple_of else count


def read_clip(
    path: str | Path | io.BytesIO,
    max_frames: int | None = 100,
    fps: float | None = None,
    multiple_of: int = 1,
    max_pixels: int | None = None,
    side_multiple: int = 2,
) -> Clip:
    """Decode the frames that frame_count() says, evenly spaced from the first to the last; no others are kept.

    Frames come upright, as the file's rotation says.

    Args:
        fps: frames per second to take, at most.
        max_pixels: height × width of a frame, at most; larger ones are scaled down, keeping their aspect nearly.
        side_multiple: what the sides of frames that are scaled are multiples of.

    Raises:
        BadVideo: the file has no frames that can be decoded.
        InputError: a limit that cannot be, or more frames than host memory holds.
    """
    _check_limits(max_frames, fps, max_pixels)
    import av

    limits, size = (max_frames, fps, multiple_of), (max_pixels, side_multiple)
    try:
        times = _listed_times(path)
        clip = _decoded(path, times, limits, size) if times else None
        # Where the list is wrong (damaged files, containers without times), what decodes is counted first.
        clip = clip or _decoded(path, _decoded_times(path), limits, size)
    except InputError:
        raise
    except (av.FFmpegError, OSError, ValueError, MemoryError) as error:
        raise _unreadable(path, error) from error
    if clip is None:
        raise BadVideo(f"{name_of(path)}: none of its frames can be decoded")
    return clip


def glance(path, max_frames: int | None = 100, fps: float | None = None, max_pixels: int | None = None) -> float:
    """Pixels of the frames that read_clip() would take, roughly: what the file's header says.

    Raises:
        BadVideo: the file cannot be opened as a video.
    """
    import av

    try:
        with _opened(path) as container:
            stream = _video_stream(container, path)
            rate = float(stream.average_rate or stream.guessed_rate or 24)
            total, seconds = _stated_length(container, stream, rate) or _counted_length(container, stream, rate)
            count = frame_count(total, seconds, max_frames, fps)
            return float(count * min(stream.height * stream.width, max_pixels or math.inf))
    except (av.FFmpegError, OSError, MemoryError) as error:
        raise _unreadable(path, error) from error


def _stated_length(container, stream, rate: float) -> tuple[int, float] | None:
    """Frames and seconds by the header; None where it does not say them, as in streams that were written live."""
    import av

    if stream.frames:
        return stream.frames, stream.frames / rate
    if stream.duration:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration:
        seconds = container.duration / av.time_base
    else:
        return None
    total = max(1, round(seconds * rate))
    return total, total / rate


def _counted_length(container, stream, rate: float) -> tuple[int, float]:
    """Frames and seconds by the packets, of which none is decoded."""
    import av

    total, times = 0, []
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                total += 1
                times += [packet.pts * packet.time_base] if packet.pts is not None else []
    except av.FFmpegError as error:  # cut off: the packets before are there
        _raise_if_out_of_memory(error)
    seconds = float(max(times) - min(times)) if len(set(times)) > 1 else 0.0
    return max(1, total), (seconds * total / (total - 1) if seconds else total / rate)


def _opened(path):
    import av

    if isinstance(path, io.BytesIO):
        path.seek(0)
        return av.open(path)
    return av.open(str(path))


def name_of(path) -> str:
    """What a file is called in messages."""
    return "a file within the data set" if isinstance(path, io.BytesIO) else str(path)


def _unreadable(path, error: Exception) -> InputError:
    """A file that is no video, or a host without memory for it, which says nothing about the file."""
    if _is_out_of_memory(error):
        return out_of_host_memory(path, error)
    return BadVideo(f"{name_of(path)}: not a video that can be read ({one_line(error)})")


def out_of_host_memory(path, error: Exception) -> InputError:
    """The error for a medium during whose decoding host memory ended."""
    return InputError(
        f"{name_of(path)}: host memory ran out while it was decoded ({one_line(error)}): lower --max_frames, "
        "--max_pixels_per_frame or --dataloader_num_workers"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Python's and numpy's own, or the system's number in an error of FFmpeg."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def _raise_if_out_of_memory(error: Exception) -> None:
    if _is_out_of_memory(error):
        raise MemoryError(one_line(error)) from error


def _check_limits(max_frames, fps, max_pixels) -> None:
    for name, value in (("max_frames", max_frames), ("fps", fps), ("max_pixels_per_frame", max_pixels)):
        if value is not None and value <= 0:
            raise InputError(f"{name}={value} must be above 0, or None for no limit")


def _video_stream(container, path):
    """The first stream of moving pictures; a song's cover is none."""
    import av

    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        kinds = sorted({stream.type for stream in container.streams}) or ["none"]
        raise BadVideo(f"{name_of(path)}: holds no video (its streams: {', '.join(kinds)})")
    streams[0].thread_type = "AUTO"
    streams[0].codec_context.thread_count = _THREADS
    return streams[0]


@dataclass(frozen=True)
class _Times:
    """When frames are shown, in order.

    Attributes:
        seconds: from the first frame; each frame's.
        stamps: each frame's time stamp in the file; none where frames are known by their number alone.
        keys: time stamps from which decoding can start.
        last: seconds that the last frame is shown.
    """

    seconds: list[float]
    stamps: list[int] | None
    keys: list[int]
    last: float


def _listed_times(path) -> _Times | None:
    """What the container's packets say, without decoding any; None where they do not say it."""
    import av

    stamps, keys, duration = [], [], None
    with _opened(path) as container:
        stream = _video_stream(container, path)
        try:
            for packet in container.demux(stream):
                if not packet.size or packet.is_discard:
                    continue
                if packet.pts is None:
                    return None
                stamps.append(packet.pts)
                duration = packet.duration or duration
                if packet.is_keyframe:
                    keys.append(packet.pts)
        except av.FFmpegError as error:  # cut off: the packets before are there
            _raise_if_out_of_memory(error)
        base = float(stream.time_base)
        stamps.sort()
        if not stamps or len(set(stamps)) < len(stamps):
            return None
        if len(stamps) > 1:
            last = (stamps[-1] - stamps[-2]) * base
        else:
            last = duration * base if duration else 1 / float(stream.average_rate or 1)
        return _Times([(stamp - stamps[0]) * base for stamp in stamps], stamps, sorted(keys), last)


def _decoded_times(path) -> _Times:
    """The times of what really decodes; evenly spaced where frames carry none."""
    with _opened(path) as container:
        stream = _video_stream(container, path)
        times = [frame.time for frame in _frames(container, stream)]
        rate = float(stream.average_rate or stream.guessed_rate or 24)
    if None in times or len(times) < 2 or any(later <= earlier for earlier, later in itertools.pairwise(times)):
        times = [index / rate for index in range(len(times))]
    return _Times([time - times[0] for time in times], None, [], times[-1] - times[-2] if len(times) > 1 else 1 / rate)


def _frames(container, stream):
    """Frames in order of time; packets that do not decode are passed over."""
    import av

    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError as error:
            _raise_if_out_of_memory(error)
            packet = None
        try:
            decoded = stream.decode(packet)
        except av.FFmpegError as error:
            _raise_if_out_of_memory(error)
            decoded = []
        yield from decoded
        if packet is None or packet.size == 0:
            return


def _chosen(times: _Times, limits) -> list[int]:
    """Indices of the frames to take."""
    total = len(times.seconds)
    max_frames, fps, multiple_of = limits
    count = frame_count(total, times.seconds[-1] + times.last, max_frames, fps, multiple_of)
    even = numpy.linspace(0, total - 1, count).round().astype(int).tolist()
    step = times.seconds[-1] / max(1, total - 1)
    if all(abs(second - index * step) <= _STEADY * step for index, second in enumerate(times.seconds)):
        return even
    return _even_in_time(times.seconds, count)


def _even_in_time(seconds: list[float], count: int) -> list[int]:
    """The frame on screen at each of `count` evenly spaced times, none of them twice."""
    chosen: list[int] = []
    for number, second in enumerate(numpy.linspace(0, seconds[-1], count)):
        shown = bisect_right(seconds, second + 1e-9) - 1
        least = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(shown, least), len(seconds) - (count - number)))
    return chosen


def _decoded(path, times: _Times, limits, size) -> Clip | None:
    """The chosen frames; None where one of them did not come."""
    if not times.seconds:
        return None
    chosen = _chosen(times, limits)
    store, found = _Store(name_of(path), len(chosen), *size), 0
    with _opened(path) as container:
        stream = _video_stream(container, path)
        store.check_host_memory(stream.height, stream.width)
        if times.stamps is None:
            wanted = set(chosen)
            for index, frame in enumerate(_frames(container, stream)):
                if index in wanted:
                    store.put(found, frame)
                    found += 1
                if found == len(chosen):
                    break
        else:
            for stamp, frame in _at(container, stream, [times.stamps[index] for index in chosen], times.keys):
                if frame.pts != stamp:
                    return None
                store.put(found, frame)
                found += 1
    if found < len(chosen):
        return None
    duration = times.seconds[-1] + times.last
    return Clip(
        store.frames, tuple(chosen), tuple(times.seconds[index] for index in chosen), len(times.seconds), duration
    )


def _at(container, stream, stamps: list[int], keys: list[int]):
    """Each time stamp with the first frame at or after it. Decoding jumps where a key frame lies on the way."""
    frames, place = _frames(container, stream), None
    for stamp in stamps:
        before = bisect_right(keys, stamp) - 1
        if before >= 0 and place is not None and keys[before] > place:
            container.seek(keys[before], stream=stream)
            frames = _frames(container, stream)
        frame = next((frame for frame in frames if frame.pts is not None and frame.pts >= stamp), None)
        if frame is None:
            return
        place = frame.pts
        yield stamp, frame


class _Store:
    """A buffer for the chosen frames, and the one scaler that fills it: one made per frame takes 20 times as long
    (PyAV issue 2200)."""

    def __init__(self, name: str, count: int, max_pixels: int | None, side_multiple: int):
        from av.video.reformatter import VideoReformatter

        self.name, self.count, self.max_pixels, self.side_multiple = name, count, max_pixels, side_multiple
        self.scaler = VideoReformatter()
        self.frames = None

    def check_host_memory(self, height: int, width: int) -> None:
        """Refuse, before anything is decoded, frames that would take more than their share of host memory.

        Raises:
            InputError: says how many frames fit.
        """
        import psutil

        height, width = capped_size(height, width, self.max_pixels, self.side_multiple)
        frame, available = 3 * height * width, psutil.virtual_memory().available
        fitting = int(available * _HOST_SHARE) // max(1, frame)
        if self.count > fitting:
            raise InputError(
                f"{self.name}: {self.count} frames of {width} × {height} pixels take "
                f"{self.count * frame / _MIB:,.0f} MiB of host memory, of which {available / _MIB:,.0f} MiB are free: "
                f"use --max_frames {max(1, fitting)} or fewer, or --max_pixels_per_frame"
            )

    def put(self, index: int, frame) -> None:
        height, width = capped_size(frame.height, frame.width, self.max_pixels, self.side_multiple)
        picture = self.scaler.reformat(frame, width, height, format="rgb24", threads=1).to_ndarray()
        if frame.rotation % 360:
            picture = numpy.rot90(picture, round(frame.rotation / 90))
        if self.frames is None:
            self.frames = numpy.empty((self.count, 3, *picture.shape[:2]), numpy.uint8)
        if self.frames.shape[2:] != picture.shape[:2]:
            raise BadVideo(f"{self.name}: its frames change size from {self.frames.shape[2:]} to {picture.shape[:2]}")
        self.frames[index] = picture.transpose(2, 0, 1)


def capped_size(height: int, width: int, max_pixels: int | None, multiple: int) -> tuple[int, int]:
    """The size to decode a frame to: its own, unless that, or its sides rounded to multiples, is above the cap."""
    if max_pixels is None:
        return height, width
    rounded = [round(side / multiple) * multiple for side in (height, width)]
    if max(height * width, rounded[0] * rounded[1]) <= max_pixels:
        return height, width
    high, wide = within(height, width, multiple, 0, max_pixels)
    longest = max(multiple, max_pixels // min(high, wide) // multiple * multiple)  # of a very long frame
    return min(high, longest), min(wide, longest)


def within(
    height: int, width: int, multiple: int, least: float, most: float, frames: int = 1, rounded: int = 1
) -> tuple[int, int]:
    """The size, in multiples, whose pixels lie between two bounds; Qwen2-VL's "smart resize".

    Args:
        frames: that share the bounds.
        rounded: the same, in whole temporal patches.
    """
    high, wide = (round(side / multiple) * multiple for side in (height, width))
    if rounded * high * wide > most:
        shrink = math.sqrt(frames * height * width / most)
        high, wide = (max(multiple, math.floor(side / shrink / multiple) * multiple) for side in (height, width))
    elif rounded * high * wide < least:
        stretch = math.sqrt(least / (frames * height * width))
        high, wide = (math.ceil(side * stretch / multiple) * multiple for side in (height, width))
    return high, wide
