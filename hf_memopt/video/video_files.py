"""Video files opened with PyAV: streams, packets, frames, and the errors of files that cannot be decoded."""

import errno
import io
from pathlib import Path

from hf_memopt.errors import InputError, one_line
from hf_memopt.packages import require

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
