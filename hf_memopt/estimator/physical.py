"""Conditions that every estimate must satisfy: a result that contradicts itself is an error, not a number."""

import math
from collections.abc import Iterator

import torch

from hf_memopt.compatibility.rules import PROJECTED
from hf_memopt.errors import ImpossibleEstimate
from hf_memopt.estimator.accounting.ledger import BLOCK, Peak
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.model import count_weights
from hf_memopt.estimator.trainer_job import TrainerJob
from hf_memopt.estimator.trl_job import TrlJob
from hf_memopt.units import size

# Tensors of at most a weight's size that optimizers keep for each; three where the number is an option of theirs.
_STATES = {
    **dict.fromkeys(("sgd", "adagrad", "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit"), 1),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_8bit", "adamw_bnb_8bit", "adafactor"), 2),
}
_MOST_STATES = 3  # of the optimizers that _STATES lacks
_SPARE = 0.01  # of padded partitions, and of buffers
_BLOCKS = 4 * BLOCK  # bytes a trained tensor: of its gradient, its states and what is kept once for each of them
_FP32 = 4  # bytes
_APART, _APART_BYTES = 0.25, 32 * 2**20  # of the peaks by two ways: 1.5 % at most in 60 sharded jobs


def check_depth(extended: int, replayed: int, job: Job) -> None:
    """Check a sharded model's peak, extended from two shallow ones, against the events of all its layers in a row.

    Raises:
        ImpossibleEstimate: the first is higher.
    """
    # Of whole models the replay may be lower: it keeps no count of what offloading fetches ahead.
    whole = job.engine.plain or job.engine.flat_buffers
    if not whole and extended > (1 + _APART) * replayed + _APART_BYTES:
        _refuse(
            f"its layers need {size(extended)} by the growth of the peak from layer to layer, and {size(replayed)} "
            "one after the other"
        )


def check_physics(estimate: Estimate, peaks: dict[str, Peak], job: Job) -> None:
    """Check an estimate against itself and against what can be counted without a trace.

    Args:
        peaks: segment -> Peak, of which the estimate's is the highest.

    Raises:
        ImpossibleEstimate: two of its numbers, or a number and the model, contradict each other.
    """
    for contradiction in (*_sums(estimate), *_bounds(estimate.breakdown, peaks, job)):
        _refuse(contradiction)


def _refuse(contradiction: str) -> None:
    raise ImpossibleEstimate(
        f"no estimate, as its numbers contradict each other: {contradiction}; please report it with these settings"
    )


def _sums(estimate: Estimate) -> Iterator[str]:
    sizes = {
        "allocated": estimate.peak_allocated_bytes,
        "reserved": estimate.peak_reserved_bytes,
        "device": estimate.device_bytes,
        "host": estimate.host_bytes,
        **{f"{kind} at the peak": amount for kind, amount in estimate.breakdown.items()},
        **{f"{phase}'s peak": amount for phase, amount in estimate.phases.items()},
    }
    for name, amount in sizes.items():
        if not (math.isfinite(amount) and amount >= 0):
            yield f"{name} is {amount} bytes"
    peak, parts = estimate.peak_allocated_bytes, sum(estimate.breakdown.values())
    if parts != peak:
        yield f"the parts of the peak are {size(parts)} together, and the peak is {size(peak)}"
    if estimate.phases.get(estimate.phase) != max(estimate.phases.values()) or max(estimate.phases.values()) != peak:
        yield f"the peak of {size(peak)} is none of its phase, {estimate.phase}"
    for kind, reserved in estimate.reserved_bytes.items():
        if reserved < peak:
            yield f"{size(reserved)} are reserved ({kind}) for {size(peak)} that are allocated"
    if estimate.device_bytes < estimate.peak_reserved_bytes:
        reserved = size(estimate.peak_reserved_bytes)
        yield f"the device holds {size(estimate.device_bytes)}, of which {reserved} are reserved"


def _bounds(breakdown: dict[str, int], peaks: dict[str, Peak], job: Job) -> Iterator[str]:
    """Kinds of memory that exceed what the model's weights allow."""
    loaded = peaks["load"].by_kind.get("parameters", 0)
    sizes = job.trained_sizes()
    spare = _BLOCKS * len(sizes)
    # No engine converts or shards the weights, and none is fetched after loading; gradients have their types.
    whole = job.engine.plain and not getattr(job.memory_args, "weight_streaming", False)
    if whole:
        yield from _beyond(breakdown, "parameters", loaded, spare, "what is loaded")
        yield from _beyond(breakdown, "gradients", loaded, spare, "what is loaded")
    if isinstance(job, TrainerJob) and not isinstance(job, TrlJob):
        return  # its optimizer and the models that it holds may be the user's own
    trained = sum(sizes)
    width = max(_FP32, getattr(torch, job.dtype).itemsize)
    # DeepSpeed has fp32 master weights, and gradients of those beside the weights' own.
    has_master = job.engine.flat_buffers
    optim = job.fields.get("optim", "adamw_torch_fused")
    states = _MOST_STATES + 1 if optim in PROJECTED else _STATES.get(optim, _MOST_STATES)
    weights = f"{trained:,} trained weights"
    yield from _beyond(breakdown, "gradients", (1 + has_master) * width * trained, spare, weights)
    bound = (states + has_master) * width * trained
    yield from _beyond(breakdown, "optimizer_states", bound, spare, f"{optim} and {weights}")
    if whole and job.quantization_config is None and not isinstance(job, TrlJob):
        fewest = count_weights(job.config, job.task, job.dtype) * getattr(torch, job.dtype).itemsize
        if fewest > loaded * (1 + _SPARE):
            yield f"{size(loaded)} of weights are loaded, and the configuration has {size(fewest)}"


def _beyond(breakdown: dict[str, int], kind: str, bound: int, spare: int, reason: str) -> Iterator[str]:
    if breakdown[kind] > bound * (1 + _SPARE) + spare:
        yield f"{kind.replace('_', ' ')} are {size(breakdown[kind])} at the peak, and {reason} allow {size(bound)}"
