"""Memory over two steps, as a picture."""

import os
import tempfile
from pathlib import Path

from hf_memopt.errors import InputError
from hf_memopt.estimator.report import Estimate
from hf_memopt.hardware.catalog import GIB

_COLOURS = {"load": "#9e9e9e", "start": "#9e9e9e", "forward": "#4c78a8", "backward": "#e45756",
            "optimizer": "#72b7b2", "between": "#bab0ac", "eval": "#eeca3b"}  # fmt: skip


def plot(found: Estimate, path: str | Path, title: str) -> None:
    """Write a PNG, SVG or PDF of the predicted timeline; the file is there whole or not at all.

    Raises:
        InputError: the ending is not one that can be written, or the folder is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = Path(path)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise InputError(f"plot {path}: the name must end in .png, .svg or .pdf")
    if not path.parent.is_dir():
        raise InputError(f"plot {path}: there is no folder {path.parent}")
    heights = [size / GIB for _, size in found.timeline]
    phases = [segment.split(":")[0] for segment, _ in found.timeline]
    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    for phase, colour in _COLOURS.items():
        if phase in phases:
            there = [one == phase for one in phases]
            label = None if phase == "start" else phase
            axes.fill_between(range(len(heights)), heights, where=there, color=colour, label=label, step="mid", lw=0)
    axes.axhline(found.peak_allocated_bytes / GIB, color="black", lw=0.8, ls=":", label="peak, allocated")
    if found.capacity_bytes and found.capacity_bytes < 3 * found.device_bytes:
        axes.axhline(found.capacity_bytes / GIB, color="red", lw=0.8, ls="--", label="capacity")
    axes.set(title=title, xlabel="allocations in order: load, steps, evaluation", ylabel="GiB, predicted", xticks=[])
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper left", ncols=4, fontsize=8)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    os.close(handle)
    try:
        figure.savefig(temporary, dpi=120)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
        pyplot.close(figure)
