"""Which jobs are planned again with frozen weights in host memory, once nothing fits with them on the device."""

from dataclasses import replace

from hf_memopt.estimator.trl_tasks import TRL_TASKS
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.lower_bound import weights_alone
from hf_memopt.planner.search import Search
from hf_memopt.units import GIB, gib

_TRIES = 2  # estimates


def streaming_spec(spec: JobSpec) -> JobSpec | None:
    """A settled JobSpec with streamed weights; None where there is nothing to stream or weight_streaming refuses.

    It is not asked for before: a device that holds the weights trains faster, and needs no host memory.
    """
    preset = spec.preset
    if preset.processes > 1 or not preset.hardware.discrete_memory or preset.method == "full":
        return None
    if spec.memory_args.weight_streaming or spec.streaming:
        return None
    if spec.task in TRL_TASKS or spec.video is not None:
        return None
    return replace(spec, streaming=True)


def lacks_memory(spec: JobSpec) -> str:
    """Why device and host together cannot hold the weights, which is known without a trace; empty where they may."""
    alone, host = weights_alone(spec), spec.host_memory
    if alone is None or host is None or alone[0] <= spec.memory_budget + host.bytes:
        return ""
    return (
        f"{gib(alone[0])} for {alone[1]} alone, and {gib(spec.memory_budget)} of the device and {gib(host.bytes)} "
        f"of its host may be used ({host.source}; --host-memory sets the limit)"
    )


def what_lacks(spec: JobSpec, search: Search) -> str:
    """Why nothing fits a spec with streamed weights."""
    fitting, host = _fitting(spec, search), spec.host_memory
    if not fitting or host is None:
        needs = int(min(map(search.needs, (*search.choices, *search.short_of_host))))
        return f"needs about {gib(needs)} with weights in host memory, of {gib(spec.memory_budget)}"
    return (
        f"needs about {gib(search.host_bytes(fitting[0]))} of host memory, of {gib(host.bytes)} ({host.source}; "
        "--host-memory sets the limit)"
    )


def with_host_memory(spec: JobSpec, search: Search) -> str | None:
    """The limit of host memory with which a spec with streamed weights fits, as a sentence; None for none."""
    shares = {choice.streamed: choice for choice in reversed(_fitting(spec, search))}
    for choice in sorted(shares.values(), key=search.host_bytes)[:_TRIES]:
        search.estimate([choice])
        estimate = search.found[choice]
        if estimate is not None and estimate.device_bytes <= spec.memory_budget:
            memory = -(-estimate.host_bytes // GIB)
            return f"--host-memory {memory} (frozen weights are streamed from there): {gib(estimate.device_bytes)}"
    return None


def _fitting(spec: JobSpec, search: Search) -> list:
    """Choices that fit the device by their sketches and lack host memory, from the one that needs the least of it."""
    fitting = [choice for choice in search.short_of_host if search.needs(choice) <= spec.memory_budget]
    # Of larger micro-batches sketches say too little, and what is proposed must be sure to fit.
    return sorted(fitting, key=lambda one: (search.host_bytes(one), one.approximations, search.needs(one)))
