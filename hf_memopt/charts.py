"""Charts: as SVG inside a page, once wide, once narrow for phones; or as a picture in a file."""

import io
import re
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import write_whole
from hf_memopt.units import GIB, MIB

COLOURS = {
    "parameters": "#4c78a8",
    "gradients": "#e45756",
    "optimizer_states": "#72b7b2",
    "activations": "#f2a541",
    "logits": "#b279a2",
    "workspace": "#9d755d",
    "communication": "#54a24b",
    "temporaries": "#b279a2",
    "other": "#8a8a8a",
}
JOB_PHASES = {
    "load": "#9e9e9e",
    "forward": "#4c78a8",
    "backward": "#e45756",
    "optimizer": "#72b7b2",
    "between": "#bab0ac",
    "eval": "#eeca3b",
}
PHASES = {"train": "#4c78a8", "eval": "#b8860b", "save": "#54a24b"}
_SIZES = {"wide": (9.6, 3.6), "narrow": (4.2, 3.4)}


def both(draw: Callable[[object, bool], None], name: str) -> dict[str, str]:
    """Draw twice.

    Args:
        draw: gets matplotlib's axes, and whether they are narrow.
        name: tells one chart of a page from another; it is in the elements' ids.

    Returns:
        `wide` and `narrow`, each an `<svg>` element that a screen reader passes over: the page says it in words.
    """
    return {width: _svg(draw, width, name) for width in _SIZES}


def save(path: str | Path, title: str, draw: Callable[[object], None]) -> None:
    """Draw into a PNG, SVG or PDF, which is there whole or not at all.

    Raises:
        InputError: the ending is not one that can be written, or the folder is not there.
    """
    path = Path(path)
    check_path(path)
    drawn = io.BytesIO()
    with _figure((10, 4.5)) as (made, axes):
        draw(axes)
        axes.set_title(title)
        made.savefig(drawn, format=path.suffix.removeprefix("."), dpi=120)
    with as_input_error(f"plot {path}", OSError):
        write_whole(path, drawn.getvalue())


def check_path(path: Path) -> None:
    """Refuse a path where no picture can be written.

    Raises:
        InputError: the ending is not one that can be written, or the folder is not there.
    """
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"plot {path}: the name must end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise InputError(f"plot {path}: there is no folder {path.parent}")


@contextmanager
def _figure(size: tuple[float, float]):
    """matplotlib's figure and axes, which nobody sees on a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings = {
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        made, axes = pyplot.subplots(figsize=size, layout="constrained")
        try:
            yield made, axes
        finally:
            pyplot.close(made)


def _svg(draw, width: str, name: str) -> str:
    import matplotlib

    with _figure(_SIZES[width]) as (made, axes), matplotlib.rc_context({"svg.hashsalt": f"{name}-{width}"}):
        draw(axes, width == "narrow")
        text = io.StringIO()
        made.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-{width}-", svg)  # ids of two charts must differ
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.S)
    return re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', 'aria-hidden="true" focusable="false"', svg, count=1)


def over_time(
    axes, narrow: bool, readings, thresholds: dict[str, float], capacity: int, predicted: int | None, events
) -> None:
    """A run's memory against the minutes: what is held, the most so far, and what it is measured against."""
    start, top = readings[0]["time"], max(reading["peak_allocated"] for reading in readings)
    unit, name = axis_unit(top)
    minutes = [(reading["time"] - start) / 60 for reading in readings]
    peaks, used = ([reading[field] / unit for reading in readings] for field in ("peak_allocated", "allocated"))
    axes.plot(minutes, peaks, color="#222222", lw=1, label="peak so far")
    axes.fill_between(minutes, used, color="#4c78a8", alpha=0.25, lw=0)
    for phase, colour in PHASES.items():
        places = [place for place, reading in enumerate(readings) if reading.get("phase") == phase]
        if places:
            times, sizes = ([values[place] for place in places] for values in (minutes, used))
            axes.plot(times, sizes, "o", ms=3, color=colour, label=f"allocated, {phase}")
    near = top > 0.4 * capacity
    for threshold, share in thresholds.items():
        if near:
            colour = {"warning": "#b8860b", "critical": "#d2691e", "emergency": "#b22222"}.get(threshold, "#888888")
            axes.axhline(share * capacity / unit, color=colour, lw=0.9, ls="--", label=f"{threshold} {share:.0%}")
    if near:
        axes.axhline(capacity / unit, color="black", lw=1.2, label="capacity")
    if predicted:
        axes.axhline(predicted / unit, color="#7b2d8b", lw=1, ls=":", label="predicted peak")
    by_step = {reading["step"]: at for at, reading in zip(minutes, readings, strict=True)}
    times = [by_step[min(by_step, key=lambda step: abs(step - at))] for at in events]
    if times:
        axes.plot(times, [0] * len(times), "^", color="#b22222", ms=7, label="event", clip_on=False)
    axes.set(xlabel="minutes", ylabel=name, xlim=(0, max(minutes[-1], 0.01)))
    axes.set_ylim(0, 1.05 * max([top, (predicted or 0), 1] + [capacity] * near) / unit)
    legend(axes, 2 if narrow else 4)


def by_phase(axes, narrow: bool, timeline: list[tuple[str, int]], peak: int, capacity: int | None = None) -> None:
    """A job's predicted memory, allocation after allocation, coloured by phase."""
    unit, name = axis_unit(peak)
    places, heights = range(len(timeline)), [size / unit for _, size in timeline]
    for phase, colour in JOB_PHASES.items():
        in_phase = [point in ((phase,) if phase != "load" else ("load", "start")) for point, _ in timeline]
        if any(in_phase):
            axes.fill_between(places, heights, where=in_phase, color=colour, step="mid", lw=0, label=phase)
    axes.axhline(peak / unit, color="#222222", lw=0.8, ls=":", label="peak")
    if capacity:
        axes.axhline(capacity / unit, color="#b22222", lw=0.8, ls="--", label="capacity")
    axes.set(xlabel="allocations in order: load, two steps, evaluation", ylabel=f"{name}, predicted", xticks=[])
    axes.set_xlim(0, max(1, len(heights) - 1))
    axes.set_ylim(bottom=0)
    legend(axes, 3 if narrow else 7, below=0.12)


def compared(axes, narrow: bool, runs: dict[str, list[dict]]) -> None:
    """The memory that several runs held, each from its own beginning."""
    unit, unit_name = axis_unit(max(reading["peak_allocated"] for readings in runs.values() for reading in readings))
    for name, readings in runs.items():
        start = readings[0]["time"]
        axes.plot(
            [(reading["time"] - start) / 60 for reading in readings],
            [reading["peak_allocated"] / unit for reading in readings],
            label=name[:30],
        )
    axes.set(xlabel="minutes", ylabel=f"{unit_name}, peak so far")
    axes.set_ylim(bottom=0)
    legend(axes, 1 if narrow else 3)


def axis_unit(top: float) -> tuple[int, str]:
    """The unit of an axis that ends at so many bytes."""
    return (GIB, "GiB") if top >= GIB else (MIB, "MiB")


def legend(axes, columns: int, below: float = 0.2) -> None:
    axes.legend(fontsize=8, ncols=columns, loc="upper center", bbox_to_anchor=(0.5, -below), frameon=False)
