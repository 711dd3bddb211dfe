"""The measured peak on a CPU, from the profiler's allocator events."""

import gc
from collections.abc import Callable


def allocator_peak(job: Callable[[], object]) -> int:
    """The most bytes that were allocated at once on the CPU while a function ran."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # freeing what was allocated before would count as negative
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        job()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak
