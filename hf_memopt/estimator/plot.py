"""Memory over two steps, as a picture."""

from pathlib import Path

from hf_memopt import charts
from hf_memopt.estimator.result import Estimate


def plot(found: Estimate, path: str | Path, title: str) -> None:
    """Write a PNG, SVG or PDF of the predicted timeline; the file is there whole or not at all.

    Raises:
        InputError: the ending is not one that can be written, or the folder is not there.
    """
    timeline = [(segment.split(":")[0], size) for segment, size in found.timeline]
    near = found.capacity_bytes and found.capacity_bytes < 3 * found.device_bytes
    capacity = found.capacity_bytes if near else None
    peak = found.peak_allocated_bytes
    charts.save(path, title, lambda axes: charts.by_phase(axes, False, timeline, peak, capacity))
