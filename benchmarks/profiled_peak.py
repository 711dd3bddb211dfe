"""Measured peaks on a CPU, from the profiler's allocator events."""

import gc
from collections.abc import Callable


def allocator_peak(job: Callable[[], object]) -> int:
    """The most bytes that were allocated at once on the CPU while a function ran."""
    return allocator_peaks(job)[""]


def allocator_peaks(job: Callable[[], object], ranges: tuple[str, ...] = ()) -> dict[str, int]:
    """The same, and the most within each of the ranges that the function names by torch.profiler.record_function.

    Returns:
        Range -> bytes; "" for all of the function.
    """
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # freeing what was allocated before would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        job()
    events = sorted(recorded.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    live, peaks, ends = 0, {"": 0}, dict.fromkeys(ranges, 0)
    for event in events:
        if event.name() in ends:
            ends[event.name()] = event.start_ns() + event.duration_ns()
        elif event.name() == "[memory]":
            live += event.nbytes()
        inside = [name for name, end in ends.items() if event.start_ns() <= end]
        for name in ("", *inside):
            peaks[name] = max(peaks.get(name, 0), live)
    return peaks
