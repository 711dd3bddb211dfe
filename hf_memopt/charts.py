"""Charts: as SVG inside a page, once wide, once narrow for phones; or as a picture in a file."""

import base64
import io
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from html import escape
from itertools import cycle, groupby, product
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.files import write_whole
from hf_memopt.units import GIB, MIB

# One colour has one meaning in every chart and table: hues are parts of memory, greys and hatching phases of a step.
# Hues have 3 to 1 against a white page and against a dark one (WCAG 2.2, 1.4.11), and are no verdict's.
PARTS = {
    "parameters": "#2f6fc0",
    "gradients": "#c94f9b",
    "optimizer_states": "#128f86",
    "activations": "#d07c0c",
    "logits": "#7d55c7",
    "workspace": "#8a5a3c",
    "communication": "#7fa015",
    "temporaries": "#b07f86",
    "context and allocator": "#41697b",
    "other": "#978b3c",
}
_INK, _GREY, _PALE = "#1d2430", "#6d7683", "#dfe3e8"
# Phase -> fill and hatching.
PHASES = {
    "load": (_PALE, ""),
    "weight_sync": ("white", "|||"),
    "generation": ("white", "xxx"),
    "log_probs": ("white", "---"),
    "rewards": ("white", "ooo"),
    "forward": ("#b4bcc6", ""),
    "backward": (_GREY, ""),
    "optimizer": ("white", "/////"),
    "between": ("#f3f5f7", ""),
    "eval": ("white", "...."),
}
_MARKERS = {"train": "o", "eval": "s", "save": "D"}
_DASHES = {"warning": (0, (1, 2)), "critical": (0, (3, 2)), "emergency": (0, (6, 2))}
_SIZES = {"wide": (9.6, 3.0), "narrow": (4.2, 3.4)}
_DPI = 160  # of pictures, for screens of two pixels a point


def both(draw: Callable[[object, bool], None], name: str) -> dict[str, str]:
    """Draw twice.

    Args:
        draw: gets matplotlib's axes, and whether they are narrow.
        name: tells one chart of a page from another; it is in the elements' ids.

    Returns:
        `wide` and `narrow`, each an `<svg>` element that a screen reader passes over: the page says it in words.
    """
    return {width: _svg(draw, width, name) for width in _SIZES}


def save(path: str | Path, title: str, draw: Callable[[object, bool], None]) -> None:
    """Draw into a PNG, SVG or PDF, or wide and narrow into an HTML file; it is there whole or not at all.

    Raises:
        InputError: the ending is not one that can be written, or the folder is not there.
    """
    path = Path(path)
    check_path(path)
    drawn = _html(title, draw) if path.suffix == ".html" else _picture(draw, path.suffix, title=title)
    with as_input_error(f"plot {path}", OSError):
        write_whole(path, drawn)


def check_path(path: Path) -> None:
    """Refuse a path where no picture can be written.

    Raises:
        InputError: the ending is not one that can be written, or the folder is not there.
    """
    if path.suffix not in (".png", ".svg", ".pdf", ".html"):
        raise InputError(f"plot {path}: the name must end in .png, .svg, .pdf or .html")
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
        "hatch.linewidth": 0.6,
        "text.parse_math": False,
    }
    with matplotlib.rc_context(settings):
        made, axes = pyplot.subplots(figsize=size, layout="constrained")
        try:
            yield made, axes
        finally:
            pyplot.close(made)


def _picture(draw, suffix: str, width: str = "wide", title: str = "") -> bytes:
    drawn = io.BytesIO()
    with _figure(_SIZES[width]) as (made, axes):
        draw(axes, width == "narrow")
        axes.set_title(title)
        made.savefig(drawn, format=suffix.removeprefix("."), dpi=_DPI)
    return drawn.getvalue()


def _html(title: str, draw) -> bytes:
    """A `<figure>` whose picture is narrow on phones; in ASCII, for a file that declares no encoding."""
    wide, narrow = (
        f"data:image/png;base64,{base64.b64encode(_picture(draw, '.png', width)).decode()}" for width in _SIZES
    )
    source = f'<source media="(max-width: 40rem)" srcset="{narrow}">'
    image = f'<img alt="{escape(title)}" src="{wide}" style="width: 100%">'
    figure = f"<figure><picture>{source}{image}</picture><figcaption>{escape(title)}</figcaption></figure>\n"
    return figure.encode("ascii", "xmlcharrefreplace")


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
    axes.fill_between(minutes, used, color=_PALE, lw=0)
    axes.plot(minutes, peaks, color=_INK, lw=1, label="peak so far")
    for phase, marker in _MARKERS.items():
        places = [place for place, reading in enumerate(readings) if reading.get("phase") == phase]
        if places:
            times, sizes = ([values[place] for place in places] for values in (minutes, used))
            face = _GREY if phase == "train" else "white"
            axes.plot(
                times, sizes, marker, ms=4, mfc=face, mec=_GREY, ls="", label=f"allocated, {phase}", clip_on=False
            )
    near = top > 0.4 * capacity
    for threshold, share in thresholds.items():
        if near:
            dashes = _DASHES.get(threshold, "-.")
            axes.axhline(share * capacity / unit, color=_GREY, lw=1.2, ls=dashes, label=f"{threshold} {share:.0%}")
    if near:
        axes.axhline(capacity / unit, color=_INK, lw=1.5, label="capacity")
    if predicted:
        dashes = (0, (8, 2, 1, 2, 1, 2))
        axes.axhline(predicted / unit, color=_INK, lw=1, ls=dashes, label="predicted peak")
    by_step = {reading["step"]: at for at, reading in zip(minutes, readings, strict=True)}
    times = [by_step[min(by_step, key=lambda step: abs(step - at))] for at in events]
    if times:
        axes.plot(times, [0] * len(times), "X", color=_INK, ms=7, label="event", clip_on=False)
    axes.set(xlabel="minutes", ylabel=name, xlim=(0, max(minutes[-1], 0.01)))
    axes.set_ylim(0, 1.05 * max([top, (predicted or 0), 1] + [capacity] * near) / unit)
    legend(axes, 2 if narrow else 4)


def by_phase(axes, narrow: bool, timeline: list[tuple[str, int]], peak: int, capacity: int | None = None) -> None:
    """A job's predicted memory, allocation after allocation, filled by phase; its forward passes are numbered."""
    unit, name = axis_unit(peak)
    places, heights = range(len(timeline)), [size / unit for _, size in timeline]
    for phase, (colour, hatch) in PHASES.items():
        in_phase = [point in ((phase,) if phase != "load" else ("load", "start")) for point, _ in timeline]
        if any(in_phase):
            fill = {"facecolor": colour, "hatch": hatch, "edgecolor": _GREY, "lw": 0}
            label = phase.replace("_", " ")
            axes.fill_between(places, heights, where=in_phase, step="mid", label=label, **fill)
    axes.step(places, heights, where="mid", color=_INK, lw=0.6)
    axes.axhline(peak / unit, color=_INK, lw=0.8, ls=":", label="peak")
    if capacity:
        axes.axhline(capacity / unit, color=_INK, lw=1.5, label="capacity")
    starts = forward_passes(phase for phase, _ in timeline)
    axes.set(xlabel="allocations in order; numbers count forward passes", ylabel=f"{name}, predicted")
    axes.set_xticks(starts, [str(number) for number in range(1, len(starts) + 1)])
    axes.grid(visible=False, axis="x")
    axes.set_xlim(0, max(1, len(heights) - 1))
    axes.set_ylim(bottom=0)
    legend(axes, 3 if narrow else 7)


def forward_passes(phases: Iterable[str]) -> list[int]:
    """The places at which forward passes begin."""
    starts, place = [], 0
    for phase, run in groupby(phases):
        starts += [place] if phase == "forward" else []
        place += len(list(run))
    return starts


def compared(axes, narrow: bool, runs: dict[str, list[dict]]) -> None:
    """The memory that several runs held, each from its own beginning."""
    unit, unit_name = axis_unit(max(reading["peak_allocated"] for readings in runs.values() for reading in readings))
    styles = cycle(product(("-", "--", ":", "-."), (_INK, _GREY)))
    for (name, readings), (dashes, colour) in zip(runs.items(), styles, strict=False):
        start = readings[0]["time"]
        axes.plot(
            [(reading["time"] - start) / 60 for reading in readings],
            [reading["peak_allocated"] / unit for reading in readings],
            color=colour,
            ls=dashes,
            label=name[:30],
        )
    axes.set(xlabel="minutes", ylabel=f"{unit_name}, peak so far")
    axes.set_ylim(bottom=0)
    legend(axes, 1 if narrow else 3)


def axis_unit(top: float) -> tuple[int, str]:
    """The unit of an axis that ends at so many bytes."""
    return (GIB, "GiB") if top >= GIB else (MIB, "MiB")


def legend(axes, columns: int) -> None:
    axes.figure.legend(fontsize=8, ncols=columns, loc="outside lower center", frameon=False)
