"""estimate() and estimate_trainer(): from a job's settings to its peak memory, in seconds."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import TraceResult
from hf_memopt.estimator.assembly import assemble
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.patches.trace_errors import explained
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.timing.throughput import counted_job, speed_note, throughput, unknown_speed, with_speed
from hf_memopt.estimator.tracing.parallel import one_by_one
from hf_memopt.estimator.tracing.trace import TracedJob, trace
from hf_memopt.estimator.trainer_job import describe_trainer
from hf_memopt.estimator.trl_job import describe_task
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.measured import measured_on
from hf_memopt.video.inputs import VideoInputs


def estimate(
    model,
    args,
    seq_len: int,
    hardware: str | Hardware = "auto",
    peft_config=None,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    padded: bool = False,
    quantization_config=None,
    world_size: int | None = None,
    strategy: str | None = None,
    task: str | None = None,
    kbit_preparation: bool = False,
    memory_args=None,
    packed: bool = False,
    video: VideoInputs | None = None,
    frozen: tuple[str, ...] = (),
    rank: int | None = None,
) -> Estimate:
    """Predict the peak memory of a training job on one of its devices, without its weights and without the device.

    The real Trainer, and the real engine where there is one, takes two optimizer steps on fake tensors, on shallow
    copies of the model with two numbers of layers. Every segment of the step grows linearly with the number of layers,
    so the peak at full depth is the largest of the segments' extrapolated peaks.

    Args:
        model: a bundled architecture's name, hub id, folder, config.json or PretrainedConfig.
        args: TrainingArguments, or a dict of its fields. `deepspeed`: a dict, a file, or a shipped JSON's name.
        seq_len: tokens per sample; of a speech encoder, frames.
        hardware: a name in the catalog. "cpu" counts as the CPU's allocator does.
        peft_config: any of peft's configurations; None trains all weights.
        dtype: of the loaded weights; "auto" is the checkpoint's, which from_pretrained takes by default.
        attn_implementation: by default the model's own choice, sdpa where it has it. Flash attention of any version
            and the hub's kernels need not be installed: they count as their source says, on cards that have them.
        padded: samples are padded, so that an attention mask is built.
        quantization_config: any of transformers' quantization configurations that can be trained on; by default the
            checkpoint's own. {"dequantize": True}: its weights are dequantized while they are loaded.
        world_size: processes that train together, one device each; by default those of `args`, else 1.
        strategy: ddp, fsdp2, tpN, hsdpN, tpN_hsdpM (engines.mesh), or a DeepSpeed JSON as for `args`; by default
            what `args` says.
        task: causal-lm, masked-lm, image-classification, ctc, … (tracing.tasks.TASKS), the name of a pipeline or of an
            auto class; sft, dpo, kto, reward, grpo or rloo for TRL's trainers, `args` with the fields of their
            configurations; by default what the configuration is for. Batches of image-text-to-text are text only.
        kbit_preparation: peft's prepare_model_for_kbit_training is called on the model.
        memory_args: MemoryArguments of a MemoryTrainer; by default a plain Trainer is estimated.
        packed: several rows per sample, separated by their `position_ids`.
        video: the clips of a sample, which decide `seq_len`.
        frozen: parts of a video model that are not trained, "vision" and "projector".
        rank: the process to estimate; by default the one that needs the most memory.

    Returns:
        The Estimate, in bytes.

    Raises:
        InputError: the model is not known, or the job cannot run or is not modelled.
    """
    job = describe_task(
        model,
        args,
        seq_len,
        hardware,
        peft_config=peft_config,
        dtype=dtype,
        attn_implementation=attn_implementation,
        padded=padded,
        quantization_config=quantization_config,
        world_size=world_size,
        strategy=strategy,
        task=task,
        kbit_preparation=kbit_preparation,
        memory_args=memory_args,
        packed=packed,
        video=video,
        frozen=frozen,
        rank=rank,
    )
    return estimate_job(job)


def estimate_trainer(
    trainer, hardware: str | Hardware = "auto", world_size: int | None = None, strategy: str | None = None
) -> Estimate:
    """Predict the peak memory of `trainer.train()`, for any Trainer or subclass, which stays as it is.

    A copy of the trainer, with its class, arguments, optimizer and collator, trains a fake copy of its model on the
    largest micro-batch of its data set. Its callbacks are left out: they may write files or send logs.

    Args:
        trainer: a transformers.Trainer that has not been trained yet.
        hardware: a name in the catalog.
        world_size, strategy: as in estimate(); by default those of the trainer's arguments.

    Returns:
        The Estimate, in bytes.

    Raises:
        InputError: the trainer has no model or no data, or is of a kind that is not modelled.
    """
    return estimate_job(describe_trainer(trainer, hardware, world_size, strategy))


def estimate_job(job: Job, map_fn=one_by_one) -> Estimate:
    """The estimate of a Job.

    Args:
        map_fn: maps a function over items; parallel.on_all_cores takes half the time, in copies of this process.

    Raises:
        InputError: the job cannot be traced.
    """
    (result,) = estimate_jobs([job], map_fn)
    if isinstance(result, InputError):
        raise result
    return result


def estimate_jobs(jobs: Sequence[Job], map_fn=one_by_one, speed: bool = True) -> list[Estimate | InputError]:
    """The estimate of every job, or why it has none.

    Args:
        map_fn: as for estimate_job(); it gets all traces of all jobs in one call.
        speed: predict it, too, which takes two more traces of a job that an engine shards.
    """
    for job in jobs:
        measured_on(job.device)  # read here, so that a file that does not count is named once, not by every process
    to_trace = [_traces_needed(job, speed) for job in jobs]
    traces = iter(map_fn(_trace_or_error, [needed for each in to_trace for needed in each]))
    traced = [[(needed, next(traces)) for needed in each] for each in to_trace]
    return map_fn(_assemble_or_error, list(zip(jobs, traced, strict=True)))


def _traces_needed(job: Job, speed: bool) -> list[tuple[Job, int, bool]]:
    """Jobs and depths to trace, and whether their kernels are counted: the job's own, and where an engine shards the
    model those of one device, which take a fraction of the engine's time. They alternate, for parallel._shares()."""
    counted = counted_job(job) if speed else None
    needed = [(job, depth, counted is job) for depth in job.depths()]
    if counted is None or counted is job:
        return needed
    alone = [(counted, depth, True) for depth in counted.depths()]
    return [needs for pair in itertools.zip_longest(needed, alone) for needs in pair if needs is not None]


def _trace_or_error(needed: tuple[Job, int, bool]) -> TraceResult | InputError:
    job, depth, counted = needed
    try:
        return run_trace(dataclasses.replace(job.at_depth(depth), counted=counted))
    except InputError as error:
        return error


def _assemble_or_error(traced: tuple[Job, list]) -> Estimate | InputError:
    job, results = traced
    own = [(depth, trace) for (traced_job, depth, _), trace in results if traced_job is job]
    if errors := [trace for _, trace in own if isinstance(trace, InputError)]:
        return errors[0]
    estimate = assemble(job, *zip(*own, strict=True))
    speed = [(speed_job, depth, trace) for (speed_job, depth, counted), trace in results if counted]
    if any(isinstance(trace, InputError) for *_, trace in speed):
        return with_speed(estimate, None, "speed: not predicted, as the model cannot be traced without its engine")
    if not speed:
        return with_speed(estimate, None, f"speed: {unknown_speed(job) or 'not asked for'}")
    counted, depths, traces = zip(*speed, strict=True)
    full = estimate.device_bytes >= (job.device.memory or math.inf)
    result = throughput(job, counted[0], depths, traces, full)
    return with_speed(estimate, result, speed_note(job.device, result))


def run_trace(job: TracedJob) -> TraceResult:
    """trace(), with a library's errors as input errors.

    Raises:
        InputError: a setting that the model or the Trainer refuses.
        IncompatibleLibrary: an installed library does not fit the trace.
    """
    names = map(str, job.inputs) if isinstance(job.inputs, Mapping) else job.batch
    with explained(job.fields, names, own_batch=job.inputs is not None):
        return trace(job)
