"""Video files of many kinds for tests, made with PyAV."""

from fractions import Fraction
from pathlib import Path

import av
import numpy


def numbered(count: int, height: int = 48, width: int = 64):
    """Frames that say their number: brightness rises with it."""
    for index in range(count):
        yield numpy.full((height, width, 3), 20 + index * 200 // max(1, count - 1), numpy.uint8)


def write(
    path: Path,
    frames,
    rate=10,
    codec="libx264",
    pixels="yuv420p",
    format=None,
    options=None,
    container=None,
    rotation: int = 0,
    milliseconds=None,
) -> Path:
    """Encode frames. `milliseconds` are each frame's time, for a variable rate."""
    with av.open(str(path), "w", format=format, options=container or {}) as file:
        stream = file.add_stream(codec, rate=rate, options=options or {})
        if milliseconds:
            stream.codec_context.time_base = Fraction(1, 1000)
        for index, frame in enumerate(frames):
            if index == 0:
                stream.height, stream.width, stream.pix_fmt = *frame.shape[:2], pixels
                if rotation:
                    stream.set_display_rotation(rotation)
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            if milliseconds:
                picture.pts, picture.time_base = milliseconds[index], Fraction(1, 1000)
            file.mux(stream.encode(picture))
        file.mux(stream.encode())
    return path


def audio(path: Path) -> Path:
    """A file with a sound and no picture."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(numpy.zeros((1, 16000), numpy.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return path
