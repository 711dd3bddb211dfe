"""Short real clips to train on where none are named: a shape moves, and changes its colour halfway."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy

from hf_memopt.data.builtin_model import cached

COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 220, 40)}
_SHAPES = ("square", "disc", "bar")
_WAYS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_LENGTHS = (8, 13, 24, 40)  # frames
_SIDE = 64  # pixels
_BACKGROUND = 20
_CLIPS = 120
_VERSION = 1  # raise it when anything below changes, so that a cached folder is not taken for it
QUESTION = "Which colours does the shape have?"


def moving_shapes() -> Path:
    """A jsonl file of rows whose videos lie beside it; made on first use, then kept in the cache."""
    return cached(f"moving-shapes-{_VERSION}", _make) / "rows.jsonl"


def _make(folder: Path) -> None:
    rows = []
    for number in range(_CLIPS):
        random = numpy.random.default_rng(number)
        first, then = random.choice(list(COLOURS), 2, replace=False)
        shape, way = random.choice(_SHAPES), random.choice(list(_WAYS))
        frames = int(random.choice(_LENGTHS))
        name = f"{number:03d}.mp4"
        write_video(folder / name, drawn(shape, way, first, then, frames, random))
        turns = [("user", f"<video>{QUESTION}"), ("assistant", f"first {first} then {then}")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns], "videos": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def drawn(shape: str, way: str, first: str, then: str, frames: int, random, side: int = _SIDE) -> Iterator:
    """Frames, uint8 (side, side, 3): a shape that crosses a dark ground, lit a little differently in every clip."""
    light, half = random.uniform(0.8, 1.1), side * random.uniform(0.28, 0.36)
    down, across = numpy.mgrid[:side, :side]
    for index in range(frames):
        way_gone = (index / max(1, frames - 1) - 0.5) * (side - half)
        x, y = (side / 2 + step * way_gone for step in _WAYS[way])
        inside = {
            "square": (abs(across - x) < half) & (abs(down - y) < half),
            "disc": (across - x) ** 2 + (down - y) ** 2 < half**2,
            "bar": (abs(across - x) < half / 2) & (abs(down - y) < half),
        }[shape]
        frame = numpy.full((side, side, 3), _BACKGROUND, numpy.uint8)
        colour = COLOURS[first if index < frames / 2 else then]
        frame[inside] = numpy.clip(numpy.array(colour) * light, 0, 255)
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
