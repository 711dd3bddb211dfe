"""Clips: the chosen frames of a video file, evenly spaced over all of it, decoded into one array."""

from bisect import bisect_right
from dataclasses import dataclass, replace

import numpy

from hf_memopt.errors import InputError
from hf_memopt.units import MIB
from hf_memopt.video.frame_limits import FrameLimits
from hf_memopt.video.video_files import (
    DECODING_ERRORS,
    BadVideo,
    FrameTimes,
    VideoSource,
    average_rate,
    choose_frames,
    decode_frames,
    decoded_times,
    display_name,
    header_length,
    open_video,
    packet_length,
    packet_times,
    unreadable,
    video_stream,
)

# Of free host memory, for a clip's frames: their float tensors and the other workers need the rest.
_HOST_SHARE = 0.5


@dataclass(frozen=True)
class Clip:
    """Chosen frames of a video.

    Attributes:
        frames: uint8, (frames, 3, height, width).
        indices: of the chosen frames within the file.
        timestamps: seconds from the file's first frame.
        total: frames in the file, or in the segment of it that was asked for.
        duration: seconds of these.
    """

    frames: numpy.ndarray
    indices: tuple[int, ...]
    timestamps: tuple[float, ...]
    total: int
    duration: float

    @property
    def rate(self) -> float:
        """The file's average frames per second."""
        return self.total / self.duration

    def thinned(self, max_frames: int | None, multiple_of: int) -> "Clip":
        """The clip with at most `max_frames` of its frames, evenly spaced from the first to the last.

        Args:
            multiple_of: the model's temporal patch size.
        """
        if max_frames is None or len(self.frames) <= max_frames:
            return self
        lasts = self.timestamps[-1] - self.timestamps[0]
        times = FrameTimes(list(self.timestamps), None, [], lasts / (len(self.frames) - 1))
        chosen = choose_frames(times, FrameLimits(max_frames, multiple_of=multiple_of))
        return replace(
            self,
            frames=self.frames[chosen],
            indices=tuple(self.indices[position] for position in chosen),
            timestamps=tuple(self.timestamps[position] for position in chosen),
        )


def read_clip(source: VideoSource, limits: FrameLimits) -> Clip:
    """Decode the chosen frames of a file, upright as its rotation says; no other frame is kept.

    Raises:
        BadVideo: the file has no frames that can be decoded.
        InputError: more frames than host memory holds.
    """
    try:
        times = packet_times(source)
        clip = _decode(source, times, limits) if times else None
        # Packets promise frames that do not decode (damaged files) or lack timestamps: decode once to count them.
        clip = clip or _decode(source, decoded_times(source), limits)
    except InputError:
        raise
    except (*DECODING_ERRORS, ValueError) as error:
        raise unreadable(source, error) from error
    if clip is None:
        raise BadVideo(f"{display_name(source)}: none of its frames can be decoded")
    return clip


@dataclass(frozen=True)
class ClipOutline:
    """The outline of what read_clip() would return, from the file's header.

    Attributes:
        frames: that would be chosen.
        height, width: pixels of each.
        total: frames in the file, or in the segment of it that was asked for.
        rate: frames per second of the file.
    """

    frames: int
    height: int
    width: int
    total: int
    rate: float

    @property
    def pixels(self) -> int:
        """The pixels of all frames."""
        return self.frames * self.height * self.width


def outline_clip(source: VideoSource, limits: FrameLimits) -> ClipOutline:
    """The frames that read_clip() would return. Headers may say a frame too many or too few.

    Raises:
        BadVideo: the file cannot be opened as a video.
    """
    try:
        with open_video(source) as container:
            stream = video_stream(container, source)
            rate = average_rate(stream)
            total, seconds = header_length(container, stream, rate) or packet_length(container, stream, rate)
            # Of so many seconds, those between `video_start` and `video_end`.
            start, end = limits.sampling.video_start or 0.0, limits.sampling.video_end
            share = max(0.0, min(seconds if end is None else end, seconds) - start) / seconds
            total = max(1, round(total * share))
            count = limits.count(total, seconds * share)
            return ClipOutline(count, *limits.frame_size(stream.height, stream.width, count), total, rate)
    except DECODING_ERRORS as error:
        raise unreadable(source, error) from error


def segment(source: VideoSource, times: FrameTimes, limits: FrameLimits) -> FrameTimes:
    """The frames between `video_start` and `video_end`.

    Raises:
        BadVideo: there are none.
    """
    start, end = limits.sampling.video_start, limits.sampling.video_end
    inside = times.between(start, end)
    if not inside.seconds:
        until = "" if end is None else f" and video_end={end}"
        lasts = f"it lasts {times.duration:.2f} s"
        raise BadVideo(f"{display_name(source)}: no frame between video_start={start or 0}{until}; {lasts}")
    return inside


def _decode(source: VideoSource, times: FrameTimes, limits: FrameLimits) -> Clip | None:
    """The chosen frames; None where one of them does not decode."""
    if not times.seconds:
        return None
    times = segment(source, times, limits)
    chosen = choose_frames(times, limits)
    indices = tuple(times.first + position for position in chosen)
    buffer = FrameBuffer(display_name(source), len(chosen), limits)
    with open_video(source) as container:
        stream = video_stream(container, source)
        buffer.check_host_memory(stream.height, stream.width)
        if times.stamps is None:
            selected = set(indices)
            for index, frame in enumerate(decode_frames(container, stream)):
                if index in selected:
                    buffer.append(frame)
                if buffer.filled == len(chosen):
                    break
        else:
            for stamp, frame in _seek_frames(container, stream, [times.stamps[index] for index in chosen], times.keys):
                if frame.pts != stamp:
                    return None
                buffer.append(frame)
    if buffer.filled < len(chosen):
        return None
    timestamps = tuple(times.seconds[index] for index in chosen)
    return Clip(buffer.frames, indices, timestamps, len(times.seconds), times.duration)


def _seek_frames(container, stream, stamps: list[int], keys: list[int]):
    """Each timestamp with the first frame at or after it; seeks where a key frame lies in between."""
    frames, position = decode_frames(container, stream), None
    for stamp in stamps:
        before = bisect_right(keys, stamp) - 1
        if before >= 0 and position is not None and keys[before] > position:
            container.seek(keys[before], stream=stream)
            frames = decode_frames(container, stream)
        frame = next((frame for frame in frames if frame.pts is not None and frame.pts >= stamp), None)
        if frame is None:
            return
        position = frame.pts
        yield stamp, frame


class FrameBuffer:
    """One array for the chosen frames, filled frame by frame.

    All frames share one scaler: VideoFrame.reformat() makes one per frame, which takes 20 times as long
    (https://github.com/PyAV-Org/PyAV/issues/2200).
    """

    def __init__(self, name: str, count: int, limits: FrameLimits):
        from av.video.reformatter import VideoReformatter

        self.name, self.count, self.limits = name, count, limits
        self.scaler = VideoReformatter()
        self.frames, self.filled = None, 0

    def check_host_memory(self, height: int, width: int) -> None:
        """Refuse, before decoding, frames that would take more than their share of host memory.

        Raises:
            InputError: with the number of frames that fit.
        """
        import psutil

        height, width = self.limits.frame_size(height, width, self.count)
        frame_bytes, available = 3 * height * width, psutil.virtual_memory().available
        fitting = int(available * _HOST_SHARE) // max(1, frame_bytes)
        if self.count > fitting:
            raise InputError(
                f"{self.name}: {self.count} frames of {width} × {height} pixels take "
                f"{self.count * frame_bytes / MIB:,.0f} MiB of host memory, of which {available / MIB:,.0f} MiB are "
                f"free: use --max_frames {max(1, fitting)} or fewer, or --max_pixels_per_frame"
            )

    def append(self, frame) -> None:
        """Add a PyAV frame.

        Raises:
            BadVideo: its size is not that of the frames before it.
        """
        height, width = self.limits.frame_size(frame.height, frame.width, self.count)
        picture = self.scaler.reformat(frame, width, height, format="rgb24", threads=1).to_ndarray()
        if frame.rotation % 360:
            picture = numpy.rot90(picture, round(frame.rotation / 90))
        self.add(picture)

    def add(self, picture: numpy.ndarray) -> None:
        """Add a picture, (height, width, 3).

        Raises:
            BadVideo: its size is not that of the frames before it.
        """
        if self.frames is None:
            self.frames = numpy.empty((self.count, 3, *picture.shape[:2]), numpy.uint8)
        if self.frames.shape[2:] != picture.shape[:2]:
            raise BadVideo(f"{self.name}: its frames change size from {self.frames.shape[2:]} to {picture.shape[:2]}")
        self.frames[self.filled] = picture.transpose(2, 0, 1)
        self.filled += 1
