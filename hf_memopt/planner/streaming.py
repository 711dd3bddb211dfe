"""Which jobs are planned again with frozen weights in host memory, once nothing fits with them on the device."""

from dataclasses import replace

from hf_memopt.estimator.trl_job import TRL_TASKS
from hf_memopt.planner.search import Search
from hf_memopt.units import GIB, gib

_TRIES = 2  # estimates


def streaming_request(request):
    """A plan.Request with streamed weights; None where there is nothing to stream or weight_streaming refuses.

    It is not asked for before: a device that holds the weights trains faster, and needs no host memory.
    """
    preset, more = request.preset, request.more
    if preset.processes > 1 or not preset.hardware.memory_apart or preset.method == "full":
        return None
    if request.memory_args.weight_streaming or request.streaming:
        return None
    if more.get("task") in TRL_TASKS or more.get("video") is not None:
        return None
    return replace(request, streaming=True)


def what_lacks(request, search: Search) -> str:
    """Why nothing fits a request with streamed weights."""
    least = min([*search.choices, *search.short_of_host], key=lambda choice: (search.needs(choice), choice.levers))
    needs, budget, host = int(search.needs(least)), request.memory_budget, request.host_memory
    if needs > budget or host is None:
        return f"needs about {gib(needs)} with weights in host memory, of {gib(budget)}"
    return (
        f"needs about {gib(search.host_bytes(least))} of host memory for its weights, of {gib(host.bytes)} "
        f"({host.source}; --host-memory sets the limit)"
    )


def with_host_memory(request, search: Search) -> str | None:
    """The limit of host memory with which a request with streamed weights fits, as a sentence; None for none."""
    budget = request.memory_budget
    members = [choice for choice in search.short_of_host if search.needs(choice) <= budget]
    for share in sorted({choice.streamed for choice in members})[:_TRIES]:
        same = [choice for choice in members if choice.streamed == share]
        choice = min(same, key=lambda one: (one.complexities, search.seconds[one]))
        search.estimate([choice])
        estimate = search.found[choice]
        if estimate is not None and estimate.device_bytes <= budget:
            memory = -(-estimate.host_bytes // GIB)
            return f"--host-memory {memory} (frozen weights are streamed from there): {gib(estimate.device_bytes)}"
    return None
