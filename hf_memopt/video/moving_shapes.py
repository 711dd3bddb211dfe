"""The video recipe's default dataset: short real clips of a moving shape that changes its colour halfway."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy

from hf_memopt.data.builtin_model import cached

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 220, 40)}
_SHAPES = ("square", "disc", "bar")
_DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_LENGTHS = (8, 13, 24, 40)  # frames
_SIDE = 64  # pixels
_BACKGROUND = 20  # of 255: a dark grey
_CLIPS = 120
_VERSION = 1  # raise it when anything below changes: it invalidates cached folders
QUESTION = "Which colours does the shape have?"


def moving_shapes() -> Path:
    """A jsonl file of rows, with the videos beside it; created in the cache on first use."""
    return cached(f"moving-shapes-{_VERSION}", _make) / "rows.jsonl"


def _make(folder: Path) -> None:
    rows = []
    for number in range(_CLIPS):
        random = numpy.random.default_rng(number)
        first, second = random.choice(list(COLOURS), 2, replace=False)
        shape, direction = random.choice(_SHAPES), random.choice(list(_DIRECTIONS))
        frames = int(random.choice(_LENGTHS))
        name = f"{number:03d}.mp4"
        write_video(folder / name, draw_frames(shape, direction, (first, second), frames, random))
        turns = [("user", f"<video>{QUESTION}"), ("assistant", f"first {first} then {second}")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns], "videos": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw_frames(
    shape: str, direction: str, colours: tuple[str, str], frames: int, random, side: int = _SIDE
) -> Iterator[numpy.ndarray]:
    """Frames, uint8 (side, side, 3): a shape crosses a dark background; brightness varies from clip to clip."""
    brightness, half = random.uniform(0.8, 1.1), side * random.uniform(0.28, 0.36)
    down, across = numpy.mgrid[:side, :side]
    for index in range(frames):
        offset = (index / max(1, frames - 1) - 0.5) * (side - half)
        x, y = (side / 2 + step * offset for step in _DIRECTIONS[direction])
        inside = {
            "square": (abs(across - x) < half) & (abs(down - y) < half),
            "disc": (across - x) ** 2 + (down - y) ** 2 < half**2,
            "bar": (abs(across - x) < half / 2) & (abs(down - y) < half),
        }[shape]
        frame = numpy.full((side, side, 3), _BACKGROUND, numpy.uint8)
        colour = COLOURS[colours[0] if index < frames / 2 else colours[1]]
        frame[inside] = numpy.clip(numpy.array(colour) * brightness, 0, 255)
        yield frame


def write_video(path: Path, frames, rate: int = 10, codec: str = "libx264") -> None:
    """Encode uint8 frames (height, width, 3) as an mp4 file."""
    import av

    with av.open(str(path), "w") as container:
        stream = None
        for frame in frames:
            if stream is None:
                stream = container.add_stream(codec, rate=rate)
                stream.height, stream.width, stream.pix_fmt = *frame.shape[:2], "yuv420p"
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
