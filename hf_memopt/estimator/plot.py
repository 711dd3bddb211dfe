"""The predicted memory of a job's steps as a picture."""

from pathlib import Path

from hf_memopt import charts
from hf_memopt.estimator.result import Estimate


def plot(estimate: Estimate, path: str | Path, title: str) -> None:
    """Write a PNG, SVG, PDF or HTML file of the predicted timeline, atomically.

    Raises:
        InputError: another ending, or a folder that does not exist.
    """
    timeline = [(segment.split(":")[0], size) for segment, size in estimate.timeline]
    near = estimate.capacity_bytes and estimate.capacity_bytes < 3 * estimate.device_bytes
    capacity = estimate.capacity_bytes if near else None
    peak = estimate.peak_allocated_bytes
    charts.save(
        path,
        f"Predicted memory of {title}",
        lambda axes, narrow: charts.by_phase(axes, narrow, timeline, peak, capacity),
    )
