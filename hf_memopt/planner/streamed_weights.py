"""Check if the device can hold a job's weights at all, and plan jobs again with frozen weights in host memory."""

from dataclasses import replace

import torch

from hf_memopt.estimator.quantized_checkpoints import holds_fp8
from hf_memopt.estimator.spec_job import quantization_config
from hf_memopt.estimator.tracing.fake_quantization import is_quantized
from hf_memopt.estimator.tracing.model import count_weights, resolve_dtype
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.estimator.trl_tasks import TRL_TASKS, model_task
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choices import SearchSpace
from hf_memopt.planner.proposals import Proposal
from hf_memopt.planner.search import Search
from hf_memopt.units import GIB, gib

_TRIES = 2  # estimates


def weights_alone(spec: JobSpec) -> tuple[int, str] | None:
    """Bytes of the weights, and of the gradients where every weight has one, and which of them these are: known
    without a trace.

    Returns:
        None where the device need not hold them all (sharded, offloaded, streamed), or where a checkpoint's own
        quantization says how large they are.
    """
    preset, config = spec.preset, spec.config
    task = model_task(spec.task or infer_task(config))
    if spec.memory_args.weight_streaming:
        return None
    if is_quantized(config) and holds_fp8(config, quantization_config(spec), preset.hardware):
        return count_weights(config, task), "FP8 weights"
    sharded = preset.processes > 1 or not preset.engine.plain or "deepspeed" in spec.training
    if sharded or is_quantized(config):
        return None
    if preset.method == "qlora":
        return count_weights(config, task) // 2, "weights in 4 bits"
    dtype = resolve_dtype(config, preset.dtype)
    size = count_weights(config, task) * getattr(torch, dtype).itemsize
    # A user's own optimizer may free a layer's gradients before the next layer has its own.
    freed = spec.memory_args.optimizer_in_backward or SearchSpace(spec).steps_in_backward
    keeps = "optim" not in spec.training and not freed
    if preset.method == "full" and keeps and not spec.frozen:
        return 2 * size, f"{dtype} weights and gradients"
    return size, f"{dtype} weights"


def excessive_weights(spec: JobSpec) -> tuple[int, str] | None:
    """weights_alone() of a job that is far too large for the device, and so is not worth a trace; None of others."""
    alone = weights_alone(spec)
    return alone if alone and alone[0] > spec.memory_budget else None


def streaming_spec(spec: JobSpec) -> JobSpec | None:
    """A settled JobSpec with streamed weights; None where there is nothing to stream or weight_streaming refuses.

    It is not asked for before: a device that holds the weights trains faster, and needs no host memory.
    """
    preset = spec.preset
    nothing = preset.processes > 1 or not preset.hardware.discrete_memory or preset.method == "full"
    refused = spec.memory_args.weight_streaming or spec.task in TRL_TASKS or spec.video is not None
    return None if nothing or refused or spec.streaming else replace(spec, streaming=True)


def lacks_memory(spec: JobSpec) -> str:
    """The reason that device and host cannot hold the weights, known without a trace; empty where they may."""
    alone, host = weights_alone(spec), spec.host_memory
    if alone is None or host is None or alone[0] <= spec.memory_budget + host.bytes:
        return ""
    return (
        f"{gib(alone[0])} for {alone[1]} alone, and {gib(spec.memory_budget)} of the device and {gib(host.bytes)} "
        f"of its host may be used ({host.source}; --host-memory sets the limit)"
    )


def what_lacks(search: Search, budget: int) -> str:
    """The reason that nothing fits with streamed weights."""
    fitting, host = _fitting(search, budget), search.host_memory
    if not fitting or host is None:
        needs = int(min(map(search.needs, (*search.choices, *search.short_of_host))))
        return f"needs about {gib(needs)} with weights in host memory, of {gib(budget)}"
    return (
        f"needs about {gib(search.host_bytes(fitting[0]))} of host memory, of {gib(host.bytes)} ({host.source}; "
        "--host-memory sets the limit)"
    )


def with_host_memory(spec: JobSpec, search: Search) -> Proposal | None:
    """The limit of host memory with which a spec with streamed weights fits; None for none."""
    shares = {choice.streamed: choice for choice in reversed(_fitting(search, spec.memory_budget))}
    for choice in sorted(shares.values(), key=search.host_bytes)[:_TRIES]:
        search.estimate([choice])
        estimate = search.estimates[choice]
        if estimate is not None and estimate.device_bytes <= spec.memory_budget:
            change = f"--host-memory {-(-estimate.host_bytes // GIB)} (frozen weights are streamed from there)"
            return Proposal([change], estimate.device_bytes, spec=spec, choice=choice)
    return None


def _fitting(search: Search, budget: int) -> list:
    """Choices that fit the device by their sketches and lack host memory, from the one that needs the least of it."""
    fitting = [choice for choice in search.short_of_host if search.needs(choice) <= budget]
    # Of larger micro-batches sketches say too little, and what is proposed must be sure to fit.
    return sorted(fitting, key=lambda c: (search.host_bytes(c), c.approximations, search.needs(c)))
