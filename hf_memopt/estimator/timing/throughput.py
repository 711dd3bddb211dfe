"""The speed of a job: tokens per second and MFU, from the kernels of its trace."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from hf_memopt.estimator.accounting.ledger import Peak, TraceResult
from hf_memopt.estimator.accounting.work import computed_once, extended
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.overheads import paged_bytes
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.timing.generation_time import FORWARD, generation_note, rollout_time
from hf_memopt.estimator.timing.own_runs import OwnRuns, own_runs, speed_setup
from hf_memopt.estimator.timing.speed import has_rates, kernel_seconds, peak_rate
from hf_memopt.estimator.timing.speed_errors import DENSE, describe_error, find_error, job_kind
from hf_memopt.estimator.timing.step_time import Step, StepTime, host_link
from hf_memopt.estimator.tracing.extrapolate import count_layers
from hf_memopt.estimator.tracing.traced_arguments import traced_micro_batches
from hf_memopt.estimator.training_fields import settle_engine
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.measured import SPEEDS, constant, measured_on, show


@dataclass(frozen=True)
class Throughput:
    """Predicted speed of a job.

    Attributes:
        step_seconds: of an optimizer step, with all its micro-batches.
        tokens_per_second: of all devices together, padding included; None where samples are not made of tokens.
        mfu: share of the device's peak rate that the job's own FLOPs make up; None where the rate is not published.
            They are counted: matmuls and attention of forward and backward, without what checkpointing computes a
            second time and without the masked half of causal attention. Frozen weights have no gradients, so LoRA
            counts about 4 FLOPs a weight and token where full training counts 6 (6N of Kaplan et al. 2020).
        speed_kind: the kind of the job (speed_errors.job_kind).
        speed_error: share by which nine of ten predictions of that kind were off at most; None where none was made
            of a published run.
        generation_share: of the step, in which completions are generated; None where none are.
        speed_setup: what a run must have the same for its speed to say something of this job's.
        own_runs: the user's runs of that setup, by whose ratio these figures are scaled; None where there are none.
    """

    step_seconds: float
    tokens_per_second: float | None
    mfu: float | None
    speed_kind: str
    speed_error: float | None
    generation_share: float | None = None
    speed_setup: str | None = None
    own_runs: OwnRuns | None = None

    @classmethod
    def of(cls, job: Job, seconds: float, mfu: float | None, generation: float | None = None) -> "Throughput":
        """The speed of a job whose optimizer step takes so many seconds, with those of its generation."""
        tokens, kind = job.micro_batch_tokens, job_kind(job)
        published = find_error(kind, job.device)
        error = published and published.error
        runs = own_runs(setup := speed_setup(job, kind))
        ratio = runs.ratio if runs else 1
        speed = tokens and tokens * job.fields["gradient_accumulation_steps"] * job.world_size / seconds
        return cls(
            step_seconds=seconds / ratio,
            tokens_per_second=speed and speed * ratio,
            mfu=mfu and mfu * ratio,
            speed_kind=kind,
            speed_error=runs.error(error) if runs else error,
            generation_share=generation and generation / seconds,
            speed_setup=setup,
            own_runs=runs,
        )


def counted_job(job: Job) -> Job | None:
    """The job whose trace has the kernels: of sharded engines the same on one device, without the engine, and with
    whole samples, whose kernels the processes that share them divide evenly. None where no speed is predicted."""
    if unknown_speed(job):
        return None
    if job.engine.plain:  # its own trace has the kernels of one device
        return job
    fields, engine = settle_engine(job.engine.traceable(job.fields), "none", 1)
    more = {"engine": engine, "world_size": 1, "rank": 0, "shared": 1}
    if job.generates:  # one device alone has to generate whole groups
        steps = fields.get("steps_per_generation") or fields["gradient_accumulation_steps"]
        group, batch = job.trainer.num_generations, steps * fields["per_device_train_batch_size"]
        times = group // math.gcd(group, batch)
        fields, more["inputs"] = fields | {"steps_per_generation": times * steps}, times * job.inputs
    return dataclasses.replace(job, fields=fields | {"gradient_accumulation_steps": 1}, **more)


def throughput(
    job: Job, counted: Job, depths: Sequence[int], traces: Sequence[TraceResult], full: bool = False
) -> Throughput:
    """The speed of a job.

    Args:
        full: the device is, so that paged optimizer states leave it.
        counted: as counted_job() returns it.
        depths, traces: of `counted`, rising.
    """
    layers, period = count_layers(job.config), 1 if len(depths) == 1 else depths[1] - depths[0]
    steps = traces[0].steps
    kernels = extended(traces[0].kernels, traces[-1].kernels, (layers - depths[0]) // period)
    micro_batches = steps * traced_micro_batches(counted.fields)
    shares = micro_batches * job.shared
    taken = kernel_seconds(kernels, job.device, main_attention(job))
    needed = computed_once(kernels)
    once = kernel_seconds(needed, job.device, main_attention(job))
    peaks = job.peaks(depths, traces)
    micro_seconds = taken.micro / shares
    accumulation = job.fields["gradient_accumulation_steps"]
    step = Step(
        engine=job.engine,
        accumulation=accumulation,
        micro_seconds=micro_seconds + _waits(job, peaks, micro_seconds, once.micro / shares),
        launch_seconds=taken.launches / micro_batches,
        optimizer_seconds=taken.optimizer / steps,
        optimizer_offloaded=job.device.discrete_memory
        and bool(getattr(job.memory_args, "optimizer_cpu_offload", False)),
        paged_bytes=full and paged_bytes(peaks),
    )
    outside, layer = job.elements(trained=True)
    loaded = max(peak.by_kind.get("parameters", 0) for peak in peaks.values())
    seconds = StepTime.of(job, outside + layer * layers, loaded).seconds(step)
    generation = None
    if job.generates:
        forward = FORWARD * once.micro / shares, FORWARD * once.launches / micro_batches
        generation, scoring = rollout_time(job, peaks, *forward)
        seconds += generation + scoring
    flops = sum(count * kernel.flops for kernel, count in needed.items()) / shares
    peak = peak_rate(job.device)
    mfu = peak and accumulation * flops / seconds / peak
    return Throughput.of(job, seconds, mfu, generation)


def main_attention(job: Job) -> str | None:
    """The `attn_implementation` of a model, of its text part where the parts have their own."""
    return next(iter(job.attention), None)


def with_speed(estimate: Estimate, speed: Throughput | None, note: str) -> Estimate:
    """An estimate with the predicted speed, and a note of what it rests on or why it is unknown; and of what a step
    generates."""
    figures = {} if speed is None else vars(speed)
    share = [] if speed is None or speed.generation_share is None else [generation_note(speed.generation_share)]
    return dataclasses.replace(estimate, **figures, notes=(*estimate.notes, note, *share))


def _waits(job: Job, peaks: dict[str, Peak], computing: float, once: float) -> float:
    """Seconds that a micro-batch waits for what travels between the host and the device.

    Activations are what the host holds in forward and backward beyond what it always holds. A layer's copies overlap
    with that layer alone, those of transformers with nothing (planner.cost). Streamed weights are what it always
    holds: they come once in forward and once in backward, each layer's while the one before computes, by the link by
    which activations come back.

    Args:
        computing: seconds of a micro-batch's kernels.
        once: of these, without the second forward of checkpointed layers.
    """
    held = [peak.host for name, peak in peaks.items() if name.startswith(("forward", "backward"))]
    streamed = min(held, default=0) if getattr(job.memory_args, "weight_streaming", False) else 0
    moved = (max(held, default=0) - min(held, default=0)) / job.shared
    late = max(0.0, (2 * streamed + moved) / host_link(job.device) - computing) if streamed else 0.0
    if not moved:
        return late
    moving, exposed = moved / host_link(job.device), constant("exposed_traffic", job.device).value
    if not (getattr(job.memory_args, "activation_offload", False) or job.fields.get("activation_offloading")):
        return late + 2 * moving
    forward = FORWARD * once
    share = max(0.0, 1 - (computing - once) / forward)  # of the layers that are not checkpointed
    passes = share * forward, share * (once - forward)
    return late + sum(max(seconds, moving) + exposed * min(seconds, moving) - seconds for seconds in passes)


def unknown_speed(job: Job) -> str | None:
    """The reason that no speed is predicted; None where it is."""
    fields, device = job.fields, job.device
    if reason := unknown_rates(device):
        return reason
    if job.engine.by_transformers:
        return "not predicted for tensor parallelism and HSDP"
    bf16 = fields.get("bf16") or (job.dtype == "bfloat16" and not fields.get("fp16"))
    if bf16 and not device.native_bf16:
        return f"not predicted: {device.label} emulates bf16"
    if device.backend != "mps" and not (bf16 or fields.get("fp16") or job.dtype == "float16"):
        return "not predicted for 32-bit matmuls; with bf16=true or fp16=true it is"
    return None


def unknown_rates(device: Hardware) -> str | None:
    """The reason that nothing is known of a device's speed; None where it is."""
    if has_rates(device):
        return None
    figures = {"bandwidth": device.bandwidth, "bf16_flops": peak_rate(device)}
    missing = [name for name, value in figures.items() if not value]
    remedy = (
        "describe it with them" if device.backend == "cpu" else "describe it with them, or run hf-memopt calibrate"
    )
    return f"the {' and '.join(missing)} of {device.label} {'are' if missing[1:] else 'is'} unknown; {remedy}"


def speed_note(device: Hardware, speed: Throughput | Estimate) -> str:
    """The basis of a predicted speed (own_runs, speed_errors); for plans also how they choose where nothing is known
    of the device's."""
    if reason := unknown_rates(device):
        ratio = constant("flops_per_byte", device).value
        return f"speed: {reason}. A plan ranks as if it computed {ratio:.0f} FLOP for every byte that it reads"
    if speed.own_runs:
        return f"speed: {speed.own_runs.in_words(speed.speed_setup)}"
    file = measured_on(device)
    rates = [show(name, file.constants[name]) for name in SPEEDS if name in file.constants] if file else []
    if rates:
        return f"speed: {', '.join(rates)}: {file.source}"
    return f"speed: {describe_error(speed.speed_kind or DENSE, device)}"
