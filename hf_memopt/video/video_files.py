"""Video files opened with PyAV: streams, packets, frames with their times, and errors of files that do not decode."""

import errno
import io
import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path

import numpy

from hf_memopt.errors import InputError, one_line
from hf_memopt.packages import require
from hf_memopt.video.frame_limits import FrameLimits

require(("av", "PIL"), "a video")
import av  # noqa: E402

# Every decoder thread holds at least one decoded frame, and each data loader worker has its own decoder.
_DECODER_THREADS = 4

VideoSource = str | Path | io.BytesIO
DECODING_ERRORS = (av.FFmpegError, OSError, MemoryError)


class BadVideo(InputError):
    """A file without decodable frames; the message starts with the file name."""


def open_video(source: VideoSource):
    """An open PyAV container."""
    if isinstance(source, io.BytesIO):
        source.seek(0)
        return av.open(source)
    return av.open(str(source))


def display_name(source: VideoSource) -> str:
    """The file's name for messages."""
    return "a file embedded in the dataset" if isinstance(source, io.BytesIO) else str(source)


def video_stream(container, source: VideoSource):
    """The first video stream that is not cover art.

    Raises:
        BadVideo: the file has none.
    """
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        kinds = sorted({stream.type for stream in container.streams}) or ["none"]
        raise BadVideo(f"{display_name(source)}: no video stream in the file (its streams: {', '.join(kinds)})")
    streams[0].thread_type = "AUTO"
    streams[0].codec_context.thread_count = _DECODER_THREADS
    return streams[0]


def read_packets(container, stream):
    """The stream's packets that hold frames, up to where a truncated file breaks off; none is decoded."""
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                yield packet
    except av.FFmpegError as error:
        _raise_if_out_of_memory(error)


def decode_frames(container, stream):
    """Frames in presentation order; packets that do not decode are skipped."""
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


def unreadable(source: VideoSource, error: Exception) -> InputError:
    """The error for a file that does not decode; a host without memory says nothing about the file."""
    if _is_out_of_memory(error):
        return out_of_host_memory(source, error)
    return BadVideo(f"{display_name(source)}: not a readable video ({one_line(error)})")


def out_of_host_memory(source: VideoSource, error: Exception) -> InputError:
    """The error for a file whose decoding ran out of host memory."""
    return InputError(
        f"{display_name(source)}: host memory ran out during decoding ({one_line(error)}): lower --max_frames, "
        "--max_pixels_per_frame or --dataloader_num_workers"
    )


def _is_out_of_memory(error: Exception) -> bool:
    """Python and numpy raise MemoryError; FFmpeg reports ENOMEM."""
    return isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def _raise_if_out_of_memory(error: Exception) -> None:
    if _is_out_of_memory(error):
        raise MemoryError(one_line(error)) from error


_FALLBACK_RATE = 24  # frames per second, for streams that state none
_JITTER = 0.3  # of a frame's duration: containers round the timestamps of evenly spaced frames by up to this
_ROUNDING = 1e-6  # of seconds and of frames: sums of floating-point durations end a little beside the number meant


@dataclass(frozen=True)
class FrameTimes:
    """The times of frames, in presentation order.

    Attributes:
        seconds: of each frame, from the first one.
        stamps: presentation timestamps in the file's time base; None where frames are known by index alone.
        keys: timestamps of key frames, at which decoding can start.
        last_duration: seconds the last frame is shown.
        first: index of the first of these frames within the file.
    """

    seconds: list[float]
    stamps: list[int] | None
    keys: list[int]
    last_duration: float
    first: int = 0

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the end of the last."""
        return self.seconds[-1] - self.seconds[0] + self.last_duration

    @property
    def step(self) -> float | None:
        """Seconds between frames; None where the frame rate varies."""
        begin, total = self.seconds[0], len(self.seconds)
        step = (self.seconds[-1] - begin) / max(1, total - 1)
        even = all(abs(second - begin - index * step) <= _JITTER * step for index, second in enumerate(self.seconds))
        return step if even else None

    def between(self, start: float | None, end: float | None) -> "FrameTimes":
        """The frames shown from `start` to `end`, seconds; without frames where there are none.

        At a constant rate those of `calculate_video_frame_range` in qwen-vl-utils: from ceil(start × rate) to
        floor(end × rate).
        """
        if start is None and end is None:
            return self
        start, end = start or 0.0, math.inf if end is None else end
        if step := self.step:
            first = math.ceil(start / step - _ROUNDING)
            last = len(self.seconds) - 1 if end == math.inf else math.floor(end / step + _ROUNDING)
        else:
            first = bisect_left(self.seconds, start - _ROUNDING)
            last = bisect_right(self.seconds, end + _ROUNDING) - 1
        inside = slice(first, last + 1)
        following = self.seconds[last + 1 : last + 2]
        return FrameTimes(
            self.seconds[inside],
            self.stamps and self.stamps[inside],
            self.keys,
            following[0] - self.seconds[last] if following else self.last_duration,
            first,
        )


def average_rate(stream) -> float:
    """Frames per second."""
    return float(stream.average_rate or stream.guessed_rate or _FALLBACK_RATE)


def header_length(container, stream, rate: float) -> tuple[int, float] | None:
    """Frames and seconds from the header; None where it states neither, as in live recordings."""
    if stream.frames:
        return stream.frames, stream.frames / rate
    if stream.duration:
        seconds = float(stream.duration * stream.time_base)
    elif container.duration:
        seconds = container.duration / 1_000_000  # FFmpeg's AV_TIME_BASE: containers count microseconds
    else:
        return None
    total = max(1, round(seconds * rate))
    return total, total / rate


def packet_length(container, stream, rate: float) -> tuple[int, float]:
    """Frames and seconds from the packets."""
    packets = [packet.pts for packet in read_packets(container, stream)]
    total, stamps = len(packets), [stamp for stamp in packets if stamp is not None]
    if len(set(stamps)) < 2:
        return max(1, total), max(1, total) / rate
    seconds = float((max(stamps) - min(stamps)) * stream.time_base)
    return total, seconds * total / (total - 1)


def packet_times(source: VideoSource) -> FrameTimes | None:
    """Frame times from the container's packets; None where packets lack timestamps or repeat them."""
    stamps, keys, duration = [], [], None
    with open_video(source) as container:
        stream = video_stream(container, source)
        for packet in read_packets(container, stream):
            if packet.pts is None:
                return None
            stamps.append(packet.pts)
            duration = packet.duration or duration
            if packet.is_keyframe:
                keys.append(packet.pts)
        base = float(stream.time_base)
        stamps.sort()
        if not stamps or len(set(stamps)) < len(stamps):
            return None
        if len(stamps) > 1:
            last = (stamps[-1] - stamps[-2]) * base
        else:
            last = duration * base if duration else 1 / float(stream.average_rate or 1)
        return FrameTimes([(stamp - stamps[0]) * base for stamp in stamps], stamps, sorted(keys), last)


def decoded_times(source: VideoSource) -> FrameTimes:
    """Frame times from decoding the whole file; evenly spaced where frames carry no times."""
    with open_video(source) as container:
        stream = video_stream(container, source)
        times = [frame.time for frame in decode_frames(container, stream)]
        rate = average_rate(stream)
    if None in times or len(times) < 2 or any(later <= earlier for earlier, later in itertools.pairwise(times)):
        times = [index / rate for index in range(len(times))]
    last = times[-1] - times[-2] if len(times) > 1 else 1 / rate
    return FrameTimes([time - times[0] for time in times], None, [], last)


def choose_frames(times: FrameTimes, limits: FrameLimits) -> list[int]:
    """Positions of the frames to take, evenly spaced from the first to the last."""
    total = len(times.seconds)
    count = limits.count(total, times.duration)
    if times.step is not None:
        return numpy.linspace(0, total - 1, count).round().astype(int).tolist()
    # The frame on screen at each of `count` evenly spaced times, no frame twice.
    chosen: list[int] = []
    for number, second in enumerate(numpy.linspace(times.seconds[0], times.seconds[-1], count)):
        shown = bisect_right(times.seconds, second + 1e-9) - 1
        earliest = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(shown, earliest), len(times.seconds) - (count - number)))
    return chosen
