"""`hf-memopt plan`: the fastest settings that fit, or the most frames of a video."""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hf_memopt.cli.answer_printed import command_lines, paragraph
from hf_memopt.cli.estimate import import_libraries, settle_job
from hf_memopt.cli.foreign import plan_edits
from hf_memopt.cli.output import print_json, print_table, progress, working
from hf_memopt.cli.plan_printed import print_plan
from hf_memopt.cli.speed_printed import AmountOptions, to_dict
from hf_memopt.errors import InputError, accepted
from hf_memopt.files import folder_for, from_here
from hf_memopt.foreign.edits import in_words
from hf_memopt.foreign.source import Source
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.planner.devices import with_device_count
from hf_memopt.planner.samples.data_use import Use
from hf_memopt.presets import METHODS
from hf_memopt.units import gib


@dataclass(frozen=True)
class ExportOptions:
    """A folder to write a profile's files to, whether to replace those of another export there, and the profile."""

    folder: str | None = None
    overwrite: bool = False
    profile: str = "balanced"


def run_plan(
    spec: JobSpec,
    export: ExportOptions,
    amount: AmountOptions,
    as_json: bool,
    verbose: bool,
    source: Source | None = None,
    use: Use | None = None,
) -> int:
    """Print the profiles that fit; 0 if anything fits, 1 if nothing does.

    Args:
        use: of the data that it trains on; None where they are not read before the job runs.
        verbose: tables of everything, instead of the answer.
        source: another tool's file or command that the job was read from, whose keys the plan is to answer in.
    """
    export = replace(export, profile=accepted("profile", export.profile, PLAN_PROFILES))
    if export.folder:
        folder_for(export.folder)
    amount.read()
    import_libraries()
    from hf_memopt.planner.plan import plan_job

    working(f"reading the configuration of {spec.model}")  # of the hub, perhaps
    plan = replace(plan_job(spec, progress), data=use)
    written = _export(plan, export) if export.folder and plan.profiles else []
    keys, diff, launcher = plan_edits(source, plan.usual) if source and plan.profiles else ({}, "", None)
    if as_json:
        edits = {"keys": keys, "diff": diff, "launcher": launcher} if source else None
        print_json(plan.to_dict() | {"exported": written, "durations": _durations(plan, amount), "edits": edits})
        return 0 if plan.profiles else 1
    names = ", ".join(Path(file).name for file in written)
    after = paragraph(f"wrote {names} to {from_here(Path(written[0]).parent)}") if written else []
    if source and plan.profiles:
        after += diff.splitlines() or paragraph(f"{source.label}: {in_words(keys) or 'has these settings already'}")
        after += command_lines(f"{launcher} …", "start") if launcher and launcher not in diff else []
    words = ["hf-memopt", *sys.argv[1:]]
    if spec.quick and "--quick" in words:
        after += command_lines(shlex.join(word for word in words if word != "--quick"), "next")
    print_plan(plan, amount, verbose, after)
    return 0 if plan.profiles else 1


def _export(plan, export: ExportOptions) -> list[str]:
    """Write a profile's files; where it does not fit, the next safer one's that does."""
    from hf_memopt.planner.launch import write_files

    profile = next((profile for profile in plan.profiles if profile.name == export.profile), plan.profiles[0])
    if profile.name != export.profile:
        progress(f"nothing fits the profile {export.profile}: writing {profile.name}")
    return write_files(plan.spec, profile, export.folder, export.overwrite)


def _durations(plan, amount: AmountOptions) -> dict[str, Any]:
    """Time and cost by profile; None where nobody asks, or where the speed is unknown."""
    spec = plan.spec
    return {
        profile.name: to_dict(
            profile.estimate,
            amount.time_and_cost(profile.estimate, spec.effective_batch_size, spec.preset.processes),
        )
        for profile in plan.profiles
    }


def run_lengths(spec: JobSpec, as_json: bool) -> int:
    """Print the longest sequences by memory features; 0 if any fits, 1 if none does."""
    import_libraries()
    from hf_memopt.estimator.spec_job import read_model
    from hf_memopt.planner.plan import check_asked
    from hf_memopt.planner.samples.lengths import longest_sequences
    from hf_memopt.planner.settle import settle

    check_asked(spec)
    spec = read_model(spec)
    specs = [settle(spec, method) for method in (METHODS if spec.method == "any" else (spec.method,))]
    lengths = [(spec.method, row) for spec in specs for row in longest_sequences(spec, progress)]
    if as_json:
        rows = [{"method": method, **vars(row), "estimate": row.estimate.to_dict()} for method, row in lengths]
        print_json({"lengths": rows, "capacity_bytes": specs[0].memory})
    else:
        _print_lengths(specs[0], lengths)
    return 0 if any(row.seq_len for _, row in lengths) else 1


def _print_lengths(spec, lengths) -> None:
    title = (
        f"{spec.model_name} on {spec.preset.hardware.label} ({gib(spec.memory)}): the longest sequence predicted to "
        f"fit in {PLAN_PROFILES['balanced'][1]:.0%} of it, one sample at a time"
    )
    print("\n".join(paragraph(title)))
    if not lengths:
        print("nothing fits: the weights alone take more; see --method qlora")
        return
    table = [
        (
            method,
            row.settings,
            row.seq_len or "none",
            row.limited_by,
            gib(row.estimate.device_bytes),
            gib(row.estimate.host_bytes),
            f"{row.estimate.tokens_per_second:,.0f}" if row.estimate.tokens_per_second else "?",
        )
        for method, row in lengths
    ]
    print_table("", ("method", "settings", "tokens", "limit", "device", "host", "tokens/s"), table)


def check_frames(frames: str) -> None:
    """Refuse another value of --frames than max."""
    if frames.lower() != "max":
        raise InputError(
            f"--frames {frames}: the only value is max; for the memory of so many frames, run "
            f"`hf-memopt estimate --set max_frames={frames}`"
        )


def run_frames(spec: JobSpec, as_json: bool) -> int:
    """Print the most frames by the size of a frame; 0 if any fit, 1 if none do."""
    import_libraries()
    from hf_memopt.planner.samples.frames import most_frames

    job = frames_job(spec)
    rows = [vars(fit) | {"estimate": fit.estimate.to_dict()} for fit in most_frames(job, note=progress)]
    if as_json:
        print_json({"frames": rows, "training_arguments": job.fields, "capacity_bytes": job.device.memory})
    else:
        _print_frames(spec, job, rows)
    return 0 if any(row["max_frames"] for row in rows) else 1


def frames_job(spec: JobSpec):
    """The job with clips of one frame, whose number is varied: as `estimate` describes it."""
    from hf_memopt.estimator.spec_job import spec_job

    name, devices = with_device_count(spec.hardware, spec.world_size)
    spec = replace(
        spec,
        preset=name,
        hardware=None,
        world_size=devices,
        method="full" if spec.method == "any" else spec.method,
        clips={"max_frames": 1, **spec.clips},
        training={"per_device_train_batch_size": 1, **spec.training},
    )
    return spec_job(settle_job(spec))


def _print_frames(spec: JobSpec, job, rows) -> None:
    micro = job.fields["per_device_train_batch_size"]
    method = "full" if spec.method == "any" else spec.method
    title = (
        f"{spec.model}, {method}, micro-batch {micro}, clips of {job.video.width} × {job.video.height} on "
        f"{job.device.label} ({gib(job.device.memory)}): the most frames predicted to fit in "
        f"{job.memory_args.target_memory_utilization:.0%} of it"
    )
    print("\n".join(paragraph(title)))
    table = [
        (
            row["max_pixels_per_frame"] or "the model's own",
            row["max_frames"] or "none",
            row["seq_len"],
            gib(row["estimate"]["device_bytes"]),
        )
        for row in rows
    ]
    columns = ("--max_pixels_per_frame", "--max_frames", "tokens per sample", "predicted")
    print_table("", columns, table)
