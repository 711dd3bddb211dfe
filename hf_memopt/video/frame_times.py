"""When the frames of a file are shown, and which of them to take."""

import itertools
import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy

from hf_memopt.video.video_files import VideoSource, decode_frames, open_video, read_packets, video_stream

_FALLBACK_RATE = 24  # frames per second, for streams that state none
_JITTER = 0.3  # of a frame's duration: containers round the timestamps of evenly spaced frames by up to this


@dataclass(frozen=True)
class FrameTimes:
    """When frames are shown, in presentation order.

    Attributes:
        seconds: of each frame, from the first one.
        stamps: presentation timestamps in the file's time base; None where frames are known by index alone.
        keys: timestamps of key frames, at which decoding can start.
        last_duration: seconds the last frame is shown.
    """

    seconds: list[float]
    stamps: list[int] | None
    keys: list[int]
    last_duration: float

    @property
    def duration(self) -> float:
        """Seconds from the first frame to the end of the last."""
        return self.seconds[-1] + self.last_duration


def frame_count(
    total: int, duration: float, max_frames: int | None = None, fps: float | None = None, multiple_of: int = 1
) -> int:
    """How many frames to take: min(max_frames, total, duration × fps), at least one, rounded down.

    Args:
        duration: seconds.
        multiple_of: the model's temporal patch size; a clip with fewer frames keeps all of them.
    """
    wanted = total if fps is None else max(1, math.floor(duration * fps + 1e-6))
    count = min(total, wanted, total if max_frames is None else max_frames)
    return count - count % multiple_of if count >= multiple_of else count


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


def choose_frames(times: FrameTimes, max_frames: int | None, fps: float | None, multiple_of: int) -> list[int]:
    """Indices of the frames to take, evenly spaced from the first to the last."""
    total = len(times.seconds)
    count = frame_count(total, times.duration, max_frames, fps, multiple_of)
    step = times.seconds[-1] / max(1, total - 1)
    if all(abs(second - index * step) <= _JITTER * step for index, second in enumerate(times.seconds)):
        return numpy.linspace(0, total - 1, count).round().astype(int).tolist()
    return _evenly_in_time(times.seconds, count)  # variable frame rate


def _evenly_in_time(seconds: list[float], count: int) -> list[int]:
    """The frame on screen at each of `count` evenly spaced times, no frame twice."""
    chosen: list[int] = []
    for number, second in enumerate(numpy.linspace(0, seconds[-1], count)):
        shown = bisect_right(seconds, second + 1e-9) - 1
        least = chosen[-1] + 1 if chosen else 0
        chosen.append(min(max(shown, least), len(seconds) - (count - number)))
    return chosen
