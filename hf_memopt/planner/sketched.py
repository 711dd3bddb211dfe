"""A choice's sketch in the form of an estimate, for plans that are answered without one."""

from hf_memopt.estimator import overheads
from hf_memopt.estimator.accounting.ledger import KINDS
from hf_memopt.estimator.assembly import capacity, phase_of
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.throughput import Throughput, main_attention, speed_note, unknown_speed, with_speed
from hf_memopt.hardware.measured import constant
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.sketch import Sketch
from hf_memopt.stack.vocabulary import written


def sketched_estimate(sketch: Sketch, choice: Choice, job: Job, device_bytes: int, seconds: float) -> Estimate:
    """An Estimate with what a sketch knows.

    Args:
        job: the choice's.
        device_bytes: of the sketch, with its caution, which counts as reserved.
        seconds: of an optimizer step.
    """
    kinds = {name: sketch.kinds(name, choice) for name in sketch.plain[0].peaks}
    peaks = {name: int(sum(sizes.values())) for name, sizes in kinds.items()}
    segment = max(peaks, key=peaks.__getitem__)
    phases: dict[str, int] = {}
    for name, peak in peaks.items():
        phases[phase_of(name)] = max(peak, phases.get(phase_of(name), 0))
    estimate = Estimate(
        peak_allocated_bytes=peaks[segment],
        peak_reserved_bytes=device_bytes - overheads.context(job.device),
        device_bytes=device_bytes,
        host_bytes=_host_bytes(sketch, choice, job, device_bytes),
        phase=phase_of(segment),
        estimated=job.in_words(main_attention(job) or "sdpa"),
        breakdown={kind: int(kinds[segment].get(kind, 0)) for kind in KINDS},
        phases=phases,
        capacity_bytes=capacity(job),
        training_arguments=written(job.fields),
        notes=(),
    )
    return _with_speed(estimate, job, seconds)


def _with_speed(estimate: Estimate, job: Job, seconds: float) -> Estimate:
    if reason := unknown_speed(job):
        return with_speed(estimate, None, f"speed: {reason}")
    speed = Throughput.of(job, seconds, mfu=None)
    return with_speed(estimate, speed, speed_note(job.device, speed.speed_kind))


def _host_bytes(sketch: Sketch, choice: Choice, job: Job, device_bytes: int) -> int:
    """Bytes of one process on the host: what is offloaded, or unquantized weights on their way to the device; of
    unified memory all."""
    staged = 0 if job.quantization_config is not None else sketch.loaded
    held = max(sketch.host_bytes(choice), staged) if job.device.discrete_memory else device_bytes
    return int(held + constant("host_process_bytes", job.device).value)
