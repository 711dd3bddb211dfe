"""Assemble an Estimate from a job's traces: extrapolation, the allocator's replay, and what no CPU trace sees."""

import copy
from collections.abc import Sequence

from hf_memopt.estimator import overheads
from hf_memopt.estimator.accounting.ledger import KINDS, ROLLOUT_PHASES, WEIGHT_SYNC, Peak, TraceResult
from hf_memopt.estimator.allocator.replay import Replay, replay
from hf_memopt.estimator.colocation import add_engine, notes_on_engine
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.physical import check_depth, check_physics
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.extrapolate import count_layers
from hf_memopt.stack.vocabulary import written

_PHASES = ("load", WEIGHT_SYNC, *ROLLOUT_PHASES, "forward", "backward", "optimizer", "eval", "between", "save")
_TRACED_EVALUATIONS = 2  # batches whose kept logits are in the trace (tracing.trace)


def assemble(job: Job, depths: Sequence[int], traces: Sequence[TraceResult]) -> Estimate:
    """The estimate of a job.

    Args:
        depths: numbers of layers, rising.
        traces: of the job at each depth.

    Raises:
        ImpossibleEstimate: what comes out contradicts itself, or the model.
    """
    peaks = job.peaks(depths, traces)
    extended = max(peak.total for peak in peaks.values())
    _limit_optimizer_group(peaks, traces[-1], job, depths[-1])
    overheads.add_prefetched(peaks, job)
    logits = traces[-1].kept_logits
    overheads.add_kept_logits(peaks, logits * max(0, job.kept_batches - _TRACED_EVALUATIONS))
    if job.concatenates_logits and job.kept_batches > 1:
        overheads.add_concatenation(peaks, logits * job.kept_batches)
    peaks["save"] = copy.deepcopy(peaks["between"])  # saving needs no more on the device than is there between steps
    overheads.add_workspace(peaks, job.device)
    add_engine(peaks, job)
    segment, peak = max(peaks.items(), key=lambda item: item[1].total)
    replayed = _replay(traces[-1], *missing_layers(job.config, depths), job, peak.total)
    check_depth(extended, replayed.allocated, job)
    # What was added to the trace's peak (prefetched batches, workspaces, kept logits) is reserved too.
    added = peak.total - replayed.allocated
    reserved = {name: max(peak.total, size + added) for name, size in replayed.reserved.items()}
    expands = job.expandable and job.device.backend == "cuda"
    usual, other = (reserved["expandable" if kind else "segments"] for kind in (expands, not expands))
    resident = usual + overheads.context(job.device)
    paged = overheads.paged_on_device(resident, peaks, job.device)
    by_phase = {
        phase: max((peak.total for segment, peak in peaks.items() if phase_of(segment) == phase), default=0)
        for phase in _PHASES
    }
    by_phase = {phase: size for phase, size in by_phase.items() if size or phase not in (WEIGHT_SYNC, *ROLLOUT_PHASES)}
    estimate = Estimate(
        peak_allocated_bytes=peak.total,
        peak_reserved_bytes=usual,
        device_bytes=resident + paged,
        paged_bytes=paged,
        host_bytes=overheads.host_bytes(peaks, job, usual - peak.total, logits),
        phase=phase_of(segment),
        estimated=job.in_words(traces[-1].attention),
        breakdown={kind: peak.by_kind.get(kind, 0) for kind in KINDS},
        phases=by_phase,
        capacity_bytes=capacity(job),
        training_arguments=written(job.fields),
        notes=(*overheads.notes(job, traces[-1], peaks, other - usual), *notes_on_engine(job, peaks)),
        reserved_bytes=reserved,
        timeline=replayed.timeline,
    )
    check_physics(estimate, peaks, job)
    return estimate


def capacity(job: Job) -> int | None:
    """The memory that the device offers to the job, or the limit that the job sets itself."""
    limit = getattr(job.memory_args, "max_memory_bytes", None)
    return min((size for size in (job.device.memory, limit) if size is not None), default=None)


def missing_layers(config, depths: Sequence[int]) -> tuple[int, int]:
    """The period of a model's layers, and how many periods the deepest of its traces lacks."""
    period = 1 if len(depths) == 1 else depths[1] - depths[0]
    return period, (count_layers(config) - depths[-1]) // period


def _limit_optimizer_group(peaks: dict[str, Peak], trace: TraceResult, job: Job, depth: int) -> None:
    """Bound the optimizer's temporaries under ZeRO-3, which steps through groups of `sub_group_size` weights: beyond
    the first full group they no longer grow with the model.

    Args:
        trace: the deepest.
        depth: of that trace.
    """
    if job.engine.step_group is None or depth == count_layers(job.config):
        return
    outside, layer = job.elements(trained=True)
    group = max(1, job.engine.step_group) * job.world_size  # 0: every weight alone
    if outside + layer * count_layers(job.config) <= group:
        return
    traced_group = min(group, outside + layer * depth)
    bound = int(trace.peaks["optimizer"].by_kind.get("workspace", 0) * group / traced_group)
    peaks["optimizer"].grow("workspace", bound - peaks["optimizer"].by_kind.get("workspace", 0))


def _replay(trace: TraceResult, period: int, added: int, job: Job, peak: int) -> Replay:
    """The job's allocations in the allocator's model. DeepSpeed's flat buffers grow with the model instead of getting
    more, so the shallow model's own replay is scaled to the peak."""
    if not job.engine.flat_buffers:
        return replay(trace, period, added, job.device)
    shallow = replay(trace, period, 0, job.device)
    scale = peak / max(1, shallow.allocated)
    return Replay(
        peak,
        {name: int(size * scale) for name, size in shallow.reserved.items()},
        tuple((segment, int(size * scale)) for segment, size in shallow.timeline),
    )


def phase_of(segment: str) -> str:
    """The phase that a segment's name begins with."""
    phase = segment.split(":")[0]
    return "load" if phase == "start" else phase
