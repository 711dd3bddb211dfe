"""Output of a recipe: the job before it starts; memory, loss and samples when it ends."""

import contextlib
import logging
import os
import platform
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from hf_memopt.compatibility import resolve_engine
from hf_memopt.data.tokens import IGNORED
from hf_memopt.disk import claimed
from hf_memopt.errors import InputError, TrainingOutOfMemory, one_line
from hf_memopt.estimator.timing.own_runs import compared_speed, keep_run
from hf_memopt.files import write_json
from hf_memopt.monitor.loader import TOKEN_BYTES, LoaderMemory, loader_memory
from hf_memopt.monitor.readers import peak_resident
from hf_memopt.packages import installed_versions
from hf_memopt.presets.trl_configs import trl_trainer
from hf_memopt.recipe.job import Job, remove_new_folders
from hf_memopt.recipe.prediction import PeakBatch, predict, predict_batch, tunes_answers
from hf_memopt.recipe.preflight import quick_cpu_info
from hf_memopt.recipe.resume import remove_finished_run
from hf_memopt.redaction import redact_argv
from hf_memopt.reports.run_report import write_run_report
from hf_memopt.stack.vocabulary import newest
from hf_memopt.terminal import console
from hf_memopt.trainer.interrupt import TrainingInterrupted, TrainingTerminated
from hf_memopt.units import size

logger = logging.getLogger(__name__)
_LINES = 40  # of the loss, in a run whose user set no logging_steps
_PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "av", "hf_memopt")


def announce(job: Job, trainer, length: int, details: Sequence[tuple[str, str]] = (), **about):
    """Print what is about to run and the memory it will take, on the first process.

    Args:
        length: tokens per sample, at most.
        details: rows to print, names and texts.
        about: further arguments of predict(): video, frozen.

    Returns:
        The Estimate; None where the job cannot be traced, and on other processes.

    Raises:
        InputError: dataloader_drop_last drops every row.
    """
    # The Trainer (transformers 5.23) runs no step of an empty loader, and ends as if it had trained.
    data = trainer.train_dataset
    if job.args.dataloader_drop_last and hasattr(data, "__len__") and not len(trainer.get_train_dataloader()):
        remove_new_folders(job)
        raise InputError(
            f"dataloader_drop_last drops all of the {len(data)} rows, fewer than the batch of "
            f"{job.args.per_device_train_batch_size} × {trainer.batches}: leave it out, or lower "
            "per_device_train_batch_size"
        )
    if job.args.process_index:
        return None
    if job.recipe.dry_run:
        remove_new_folders(job)
    rows = _describe_job(job, trainer, length) + list(details)
    if levers := job.memory_args.levers():
        rows.append(("levers", ", ".join(f"{name}={value}" for name, value in levers.items())))
    if loading := _loading(job, trainer, length, about.get("video")):
        rows.append(("loading", str(loading)))
        if loading.warning:
            logger.warning("%s", loading.warning)
    estimate = predict(job, trainer, length, **about)
    if estimate is not None:
        capacity = f"of {size(estimate.capacity_bytes)}, allocated peak {size(estimate.peak_allocated_bytes)}"
        verdict = ": it does not fit" if estimate.fits is False else ""
        whole, held = estimate.device_bytes, estimate.breakdown.items()
        parts = [f"{kind.replace('_', ' ')} {size(part, whole)}" for kind, part in held if part > 2**20]
        rows += [
            ("memory", f"{size(whole)} {capacity} in {estimate.phase} (predicted){verdict}"),
            ("", ", ".join(parts)),
        ]
    for name, value in rows:
        print(f"{name:>8}  {value}")
    if job.recipe.dry_run:
        print("dry run: stopped before training, nothing was written")
    return estimate


def _describe_job(job: Job, trainer, length: int) -> list[tuple[str, str]]:
    """Rows about the preset, engine, batch, model, precision and data."""
    args, preset, model = job.args, job.preset, trainer.model
    total = sum(_count_parameters(weight) for weight in model.parameters())
    trainable = sum(_count_parameters(weight) for weight in model.parameters() if weight.requires_grad)
    optimizer = "adam_mini" if job.memory_args.adam_mini else args.optim.value
    batch = f"{_step(trainer)}, up to {length} tokens each"
    if trainer.packing:
        rows = f"{args.per_device_train_batch_size} × {args.gradient_accumulation_steps} × {trainer.batches}"
        batch = f"{rows} packed rows a step, up to {trainer.packing} tokens each"
    if budget := job.memory_args.max_tokens_per_batch:
        budgets = f"{budget} padded tokens × {args.gradient_accumulation_steps} × {trainer.batches}"
        batch = f"at most {budgets} per step, up to {length} per sample"
    rows = [("preset", f"{preset.name}, {preset.method}, on {preset.hardware.label}")]
    if job.profile is not None:
        rows.append(("profile", job.profile))
    if job.planned is not None:
        rows.append(("plan", job.planned.summary))
    left_out = f", {job.bad_rows.count} left out" if job.bad_rows.count else ""
    return [
        *rows,
        ("engine", _describe_engine(job)),
        ("batch", batch),
        ("model", f"{job.model_name}: {total:,} parameters, {trainable:,} trained"),
        (
            "dtypes",
            f"weights {preset.dtype}, compute {preset.precision}, optimizer {optimizer}, "
            f"attention {model.config._attn_implementation}",
        ),
        ("data", f"{_rows(trainer.train_dataset)} training, {_rows(trainer.eval_dataset)} held out{left_out}"),
    ]


def _describe_engine(job: Job) -> str:
    count = job.args.world_size
    processes = "1 process" if count == 1 else f"{count} processes"
    return (
        processes if resolve_engine(job.args).alone and not job.preset.mesh else f"{_engine_label(job)}, {processes}"
    )


def _loading(job: Job, trainer, length: int, video) -> LoaderMemory | None:
    """Host memory of the data loading of all processes on this machine; None where this one loads by itself."""
    args, recipe = job.args, job.recipe
    micro = args.per_device_train_batch_size
    if video is None:
        batch = micro * length * TOKEN_BYTES
    else:
        tensors = video.batch(trainer.model.config, micro).values()
        batch = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    rows = recipe.shuffle_buffer_size if recipe.streaming else 0
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return loader_memory(vars(args), batch, processes, rows, length)


def _step(trainer) -> str:
    """The samples of an optimizer step in words, and of an epoch's last one where that takes fewer."""
    args, data, batches = trainer.args, trainer.train_dataset, trainer.batches
    micro, accumulation = args.train_batch_size, args.gradient_accumulation_steps
    batch = micro * accumulation * batches
    product = f"{micro} × {accumulation} × {batches} = {batch}"
    if not hasattr(data, "__len__"):
        return f"{product} samples a step"
    steps, last = last_step(len(data), micro, accumulation, batches, args.dataloader_drop_last)
    if steps < 2 and last != batch:
        repeated = f", some of them twice over {batches} processes" if last > len(data) else ""
        return f"{product}, and the data have {len(data)} rows: {last} samples a step{repeated}"
    return f"{product} samples a step" + (f", {last} in the last of an epoch" if last != batch else "")


def last_step(rows: int, micro: int, accumulation: int, batches: int, drop_last: bool = False) -> tuple[int, int]:
    """Optimizer steps of an epoch, and the samples of its last one.

    Several processes take equally many micro-batches, for which accelerate repeats rows (`even_batches`).
    """
    together = micro * batches
    rows = rows // together * together if drop_last else rows if batches == 1 else -(-rows // together) * together
    batch = together * accumulation
    steps = -(-rows // batch)
    return steps, rows - max(0, steps - 1) * batch


def train(job: Job, trainer, resume: str | None, estimate, show: Callable | None = None) -> None:
    """Train to the end, save the model, and report: losses, memory, a few samples.

    Args:
        resume: the checkpoint folder to resume from, or None.
        estimate: what announce() returned.
        show: prints samples at the end in place of sample(), with the same arguments.
    """
    with claimed(job.args.output_dir) if job.args.process_index == 0 else contextlib.nullcontext():
        if job.recipe.overwrite and job.args.process_index == 0:
            remove_finished_run(job.args.output_dir)
        _train(job, trainer, resume, estimate)
        (show or sample)(job, trainer)
        if job.args.process_index == 0:
            print(f"next: {what_next(job.args.output_dir)}")


def _train(job: Job, trainer, resume: str | None, estimate) -> None:
    from hf_memopt.recipe.callbacks import GradientCheck, HeldOutLoss, print_in_lines
    from hf_memopt.recipe.phase_peaks import PhasePeaks

    losses, peaks = HeldOutLoss(perplexity=trl_trainer(trainer) is None or tunes_answers(trainer)), PhasePeaks()
    print_in_lines(trainer, most=None if "logging_steps" in job.given else _LINES)
    trainer.add_callback(losses)
    trainer.add_callback(GradientCheck())
    trainer.add_callback(peaks)
    trainer.when_probed = job.probed
    if estimate is not None:
        trainer.show_predicted_peak(estimate.peak_allocated_bytes)
    try:
        with quick_cpu_info(job.args):
            trainer.train(resume_from_checkpoint=resume)
    except TrainingOutOfMemory as end:
        if not trainer.state.global_step:
            job.probed(0)
        trainer.memory_events.append(end.report)
        finish(job, trainer, losses.by_step, estimate, peaks)
        raise
    except (TrainingInterrupted, TrainingTerminated) as stop:
        stop.message += _how_to_resume(job, stop.checkpoint)
        raise
    finally:
        peaks.stop()
    config = trainer.model.config
    config.use_cache = True  # the Trainer turned it off, and generation needs it
    trainer.save_model()  # first of all, so that a later failure does not lose the trained weights
    if trainer.eval_dataset is not None and trainer.state.global_step not in losses.by_step:
        config.use_cache = False
        trainer.evaluate()
        config.use_cache = True
    finish(job, trainer, losses.by_step, estimate, peaks)


def what_next(folder: str) -> str:
    """Commands for a trained model: talk to it, publish it; an adapter is merged first."""
    words = shlex.quote(str(folder))
    merge = ""
    if (Path(folder) / "adapter_config.json").is_file():
        merged = shlex.quote(f"{str(folder).rstrip('/')}-merged")
        merge, words = f"hf-memopt merge {words} {merged}; ", merged
    return f"{merge}transformers serve {words}, and beside it transformers chat {words}; hf upload YOU/NAME {words}"


def _how_to_resume(job: Job, checkpoint: str | None) -> str:
    """Say how a run that was stopped continues."""
    if checkpoint is None:
        return ""
    if str(job.args.resume_from_checkpoint or "true").lower() != "true":
        return "; the same command without resume_from_checkpoint continues"
    return "; the same command continues"


def _engine_label(job: Job) -> str:
    """The engine that runs: fsdp1 under a preset whose strategy is fsdp2, where FSDP_VERSION=1 was launched."""
    return resolve_engine(job.args, mesh=job.preset.strategy if job.preset.mesh else None).label


def finish(job: Job, trainer, losses: dict[int, float], estimated, peaks) -> None:
    """Write memory_report.json and .html into output_dir and print the closing table, on the first process.

    Args:
        peaks: PhasePeaks.
    """
    if job.args.process_index:
        return
    measured = measured_peaks()
    if peaks.bytes:  # of the first two steps, whose samples may be shorter than the longest
        measured["peak_allocated_bytes"] = peaks.bytes
    same_batch = predict_batch(job, trainer, estimated, peaks.batch)
    waited = trainer.data_wait_share
    device = job.preset.hardware
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": {"label": device.label, "memory_bytes": device.memory, "devices": job.args.world_size},
        "versions": {"python": platform.python_version(), **installed_versions(_PACKAGES)},
        "model": Path(job.model_name).name if Path(job.model_name).is_dir() else job.model_name,
        "command": " ".join(redact_argv(job.argv)),
        "preset": job.preset.name,
        "method": job.preset.method,
        "strategy": _engine_label(job),
        "settings": newest(job.args.to_dict()),
        "memory_arguments": asdict(job.memory_args),
        "levers": job.memory_args.levers(),
        "estimate": estimated and estimated.to_dict(),
        "predicted_timeline": _thinned(estimated.timeline) if estimated else [],
        "measured": measured | {"phases": peaks.phases},
        "measured_batch": peaks.batch and peaks.batch.label,
        "estimate_of_measured_batch": same_batch and same_batch.to_dict(),
        "relative_error": _relative_errors(same_batch or estimated, measured),
        "speed": compared_speed(estimated, *trainer.later_steps, split=bool(_chunks(trainer))),
        "data_wait_share": waited,
        "held_out_loss": losses,
        "global_step": trainer.state.global_step,
        "train_seconds": next(
            (line["train_runtime"] for line in trainer.state.log_history if "train_runtime" in line), None
        ),
        "events": trainer.memory_events,
        "rows": {"total": job.bad_rows.total, "dropped": job.bad_rows.counts},
    }
    if hasattr(trainer.train_dataset, "bad"):
        report["bad_videos"] = trainer.train_dataset.bad.listed()
    write_json(Path(job.args.output_dir) / "memory_report.json", report)
    keep_run(report, job.args.output_dir)
    _print_table(measured, estimated, same_batch, peaks.batch)
    if len(losses) > 1:
        first, last = min(losses), max(losses)
        print(f"held-out loss: {losses[first]:.4f} at step {first} → {losses[last]:.4f} at step {last}")
    if waited is not None:
        print(f"waiting for data: {waited:.0%} of the training time")
    if speed := report["speed"]:
        print(f"speed: {speed['tokens_per_second']:,.0f} tokens/s, where {speed['predicted']:,.0f} were predicted")
    _write_page(job.args.output_dir)
    _print_splits(trainer)


def _relative_errors(estimated, measured: dict[str, int]) -> dict[str, float]:
    """Predicted against measured, of what both have."""
    predicted = {name: getattr(estimated, name, None) for name in measured}
    return {name: predicted[name] / value - 1 for name, value in measured.items() if value and predicted[name]}


def _print_splits(trainer) -> None:
    if sizes := _chunks(trainer):
        print(
            f"memory ran short: micro-batches ran in chunks of as few as {min(sizes)} samples; "
            "the prediction is for whole ones"
        )


def _chunks(trainer) -> list[int]:
    """Samples of a chunk, each time that a micro-batch of training was split."""
    # Evaluation splits its batches too, and the event that ends a run names no size.
    sizes = [event.get("micro_batch_after") for event in trainer.memory_events if event.get("stage") != "eval"]
    return list(filter(None, sizes))


def _write_page(folder: str) -> None:
    """Write memory_report.html. The run is over and saved: files of an older run in the folder must not fail it."""
    try:
        print(f"report: {write_run_report(folder)}")
    except InputError as error:
        print(f"no HTML report: {one_line(error)}")


def _thinned(timeline, points: int = 600) -> list[tuple[str, int]]:
    """A timeline of fewer points, each the fullest of its stretch: phase and bytes."""
    stretch = max(1, len(timeline) // points)
    fullest = [max(timeline[at : at + stretch], key=lambda point: point[1]) for at in range(0, len(timeline), stretch)]
    return [(segment.split(":")[0], used) for segment, used in fullest]


def measured_peaks() -> dict[str, int]:
    """Peaks of this process so far, in bytes: what the accelerator's allocator counted, and resident host memory."""
    import torch

    peaks = {"peak_host_bytes": peak_resident()}
    if torch.cuda.is_available():
        peaks["peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        peaks["peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return peaks


def sample(job: Job, trainer) -> None:
    """Print a few continuations of held-out texts, or answers to held-out questions, on the first process."""
    import torch

    args, held_out = job.args, trainer.eval_dataset
    if args.process_index or held_out is None or not job.recipe.samples:
        return
    if not resolve_engine(args).plain or job.preset.mesh:
        print("no samples: one process cannot generate with sharded weights")
        return
    tokenizer = trainer.processing_class
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    print("samples, of rows held out: the beginning → what the model adds")
    for row in held_out.take(job.recipe.samples):
        # The masked question of a fine-tuning row, or the first tokens of a text.
        masked = next((index for index, label in enumerate(row["labels"]) if label != IGNORED), 0)
        prompt = torch.tensor([list(row["input_ids"][: masked or 16])], device=model.device)
        with torch.no_grad():
            ids = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=40,
                do_sample=True,
                temperature=0.7,
                top_k=50,
                pad_token_id=tokenizer.pad_token_id,
            )[0]
        question = tokenizer.decode(prompt[0], skip_special_tokens=True).strip()
        reply = tokenizer.decode(ids[prompt.shape[1] :], skip_special_tokens=True).strip()
        print(f"  {' '.join(question.split())!r} → {' '.join(reply.split())!r}")


def _print_table(measured: dict[str, int], limit, same_batch, batch: PeakBatch | None) -> None:
    """Predicted and measured peaks.

    Args:
        limit: the Estimate of the longest samples.
        same_batch: that of the batch whose peak was measured.
    """
    from rich.table import Table

    columns = ["predicted, longest"]
    if same_batch is not None:
        columns.append(f"predicted, {batch.label}")
    table = Table("memory of the first process", *columns, "measured", "difference")
    for name, value in measured.items():
        predicted = [getattr(estimate, name, None) for estimate in (limit, same_batch)[: len(columns)]]
        table.add_row(
            name.removesuffix("_bytes").replace("_", " "),
            *(size(value) if value else "" for value in predicted),
            size(value),
            f"{predicted[-1] / value - 1:+.1%}" if predicted[-1] and value else "",
        )
    console().print(table)


def _count_parameters(weight) -> int:
    """Parameters of a tensor: a ZeRO-3 shard and a quantized 4-bit weight keep their true number apart."""
    if hasattr(weight, "ds_numel"):
        return weight.ds_numel
    quant_state = getattr(weight, "quant_state", None)
    return quant_state.shape.numel() if quant_state is not None else weight.numel()


def _rows(data) -> str:
    return "none" if data is None else f"{len(data):,} rows" if hasattr(data, "__len__") else "a stream"
