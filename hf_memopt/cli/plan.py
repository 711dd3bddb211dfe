"""`hf-memopt plan`: the fastest settings that fit, or the most frames of a video."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.cli.cards import CardOptions, run_cards
from hf_memopt.cli.estimate import import_libraries, settle_job
from hf_memopt.cli.foreign import plan_edits
from hf_memopt.cli.output import print_json, print_table, progress
from hf_memopt.cli.speed import AmountOptions, print_profile_speeds, profile_names, to_dict
from hf_memopt.errors import InputError, choose
from hf_memopt.files import folder_for
from hf_memopt.foreign.source import Source
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.packages import missing_for
from hf_memopt.terminal import say
from hf_memopt.units import gib, size


@dataclass(frozen=True)
class ExportOptions:
    """A folder to write a profile's files to, whether to replace those of another export there, and the profile."""

    folder: str | None = None
    overwrite: bool = False
    profile: str = "balanced"


def run_which_card(spec: JobSpec, cards: CardOptions, as_json: bool) -> int:
    """Print the cards on which the job trains; 0 if there are any, 1 if there are none."""
    import_libraries()
    from hf_memopt.estimator.trl_tasks import TRL_TASKS

    if spec.task in TRL_TASKS:
        raise InputError(f"task={spec.task} is planned for one card: name it with --hardware")
    return run_cards(spec, cards, as_json)


def run_plan(
    spec: JobSpec, export: ExportOptions, amount: AmountOptions, as_json: bool, source: Source | None = None
) -> int:
    """Print the profiles that fit; 0 if anything fits, 1 if nothing does.

    Args:
        source: another tool's file or command that the job was read from, whose keys the plan is to answer in.
    """
    if export.profile not in PLAN_PROFILES:
        raise choose("profile", export.profile, PLAN_PROFILES)
    if export.folder:
        folder_for(export.folder)
    import_libraries()
    amount.read()
    from hf_memopt.planner.plan import plan_job

    plan = plan_job(spec, progress)
    written = _export(plan, export) if export.folder and plan.profiles else []
    keys, diff = plan_edits(source, plan.usual) if source and plan.profiles else ({}, "")
    if as_json:
        edits = {"keys": keys, "diff": diff} if source else None
        print_json(plan.to_dict() | {"exported": written, "durations": _durations(plan, amount), "edits": edits})
        return 0 if plan.profiles else 1
    _print_plan(plan, written, amount)
    if source and plan.profiles:
        say(diff or f"{source.label} has the settings of {plan.usual.name} already")
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
            profile.estimate, amount.time_and_cost(profile.estimate, spec.seq_len, spec.preset.processes)
        )
        for profile in plan.profiles
    }


def _print_plan(plan, written: list[str], amount: AmountOptions) -> None:
    spec = plan.spec
    preset = spec.preset
    devices = f"{preset.processes} × " if preset.processes > 1 else ""
    method = f"{preset.method}, " if plan.profiles else ""
    length = "videos" if spec.video is not None else f"{spec.seq_len} tokens"
    print(
        f"{spec.model}, {method}{spec.effective_batch_size} samples a step of {length}, on {devices}"
        f"{preset.hardware.label} ({gib(spec.memory)} each)"
    )
    if plan.profiles:
        _print_profiles(plan)
        print_profile_speeds(_by_settings(plan.profiles), amount, spec.seq_len, preset.processes)
        _print_methods(plan)
        say(_host_memory(plan))
    if plan.rejected:
        print_table(
            "left out", ("settings", "reason"), [(rejected.settings, rejected.reason) for rejected in plan.rejected]
        )
    if not plan.profiles:
        _print_nearest(plan)
    elif spec.tool is None:
        _print_start(spec, plan.usual)
    for note in plan.notes:
        say(f"note: {note}")
    if written:
        print(f"wrote {', '.join(written)}")


def _print_start(spec, profile) -> None:
    """The command that starts a profile; where there is no recipe, the fields for a script of one's own."""
    from hf_memopt.estimator.trl_tasks import TRL_TASKS
    from hf_memopt.planner.launch import (
        has_recipe,
        launch_command,
        memory_settings,
        recipe_name,
        training_arguments,
    )

    if has_recipe(spec):
        print(f"{profile.name}:\n  {launch_command(spec, profile)}")
        if missing := missing_for(recipe_name(spec), profile.preset.strategy):
            print(f"note: {missing}")
        if recipe_name(spec) == "pretrain":
            print("note: this trains on texts; for chats and answers, --task sft plans recipes/sft.py")
        return
    print(f"{profile.name}, for your own script:")
    config = TRL_TASKS[spec.task].config if spec.task in TRL_TASKS else "TrainingArguments"
    for name, fields in (
        (config, training_arguments(spec, profile)),
        ("MemoryArguments", memory_settings(profile)),
    ):
        values = ", ".join(f"{key}={value!r}" for key, value in sorted(fields.items()))
        print(f"  {name}({values})")


def _by_settings(profiles) -> list[list]:
    """The profiles, those with the same settings together."""
    return [list(group) for _, group in itertools.groupby(profiles, lambda profile: profile.choice)]


def _print_profiles(plan) -> None:
    """Print what each profile sets and is predicted to need; profiles with the same settings are one row."""
    groups = _by_settings(plan.profiles)
    rows = [
        (
            profile_names(group),
            " ".join(f"{profile.share:.0%}" for profile in group),
            group[0].summary,
            size(group[0].estimate.device_bytes),
            _speed(group[0].tokens_per_second),
        )
        for group in groups
    ]
    if plan.plain:
        rows.append(_plain_row(plan.plain))
    print_table("", ("profile", "fills", "settings", "predicted", "tokens/s"), rows)
    first = [group[0] for group in groups]
    kinds = [
        kind
        for kind in first[0].estimate.breakdown
        if any(profile.estimate.breakdown[kind] > 2**20 for profile in first)
    ]
    rows = [("phase", *(profile.estimate.phase for profile in first))]
    rows += [
        (kind.replace("_", " "), *(size(profile.estimate.breakdown[kind]) for profile in first)) for kind in kinds
    ]
    print_table("at the peak", ("memory", *map(profile_names, groups)), rows)


def _plain_row(plain) -> tuple[str, ...]:
    """The row of the settings without host memory and rounding, and what they lose."""
    about = "" if plain.estimated else "about "
    predicted = f"{about}{size(plain.device_bytes)}"
    if not plain.fits:
        return "plain alternative", "", plain.settings, f"{predicted}: does not fit", ""
    speed = f"{_speed(plain.tokens_per_second)} ({plain.relative_time:.2f} × the time)"
    return "plain alternative", "", plain.settings, predicted, speed


def _print_methods(plan) -> None:
    """The methods that fit, beside each other, where the plan chose one."""
    if len(plan.methods) < 2:
        return
    rows = [
        (
            f"{row.method} (planned)" if row.method == plan.spec.preset.method else row.method,
            row.settings,
            f"{'' if row.estimated else 'about '}{size(row.device_bytes)}",
            _speed(row.tokens_per_second),
        )
        for row in plan.methods
    ]
    print_table("methods that fit", ("method", "settings", "predicted", "tokens/s"), rows)


def _host_memory(plan) -> str:
    """The host memory that the plan needs, and the host memory that it assumes."""
    host, needed = plan.spec.host_memory, max(profile.estimate.host_bytes for profile in plan.profiles)
    short = "" if needed <= host.bytes else ": too little to load the weights through, where that holds"
    origin = f"assumed ({host.source})" if host.assumed else f"there ({host.source})"
    return (
        f"host memory: {gib(needed)} needed for each process, of {gib(host.bytes)} {origin}{short}; "
        "--host-memory says how much there is"
    )


def _speed(tokens_per_second: float | None) -> str:
    from hf_memopt.estimator.duration import two_digits

    return "unknown" if tokens_per_second is None else two_digits(tokens_per_second)


def _print_nearest(plan) -> None:
    """Print how much memory is missing, and which changes would fit."""
    if plan.missing_bytes:
        print(f"nothing fits: {gib(plan.missing_bytes)} missing")
    else:
        print("nothing fits, and no estimate says how much memory is missing")
    for change in plan.nearest:
        print(f"  would fit: {change}")


def run_lengths(spec: JobSpec, as_json: bool) -> int:
    """Print the longest sequences by memory features; 0 if any fits, 1 if none does."""
    import_libraries()
    from hf_memopt.estimator.spec_job import read_model
    from hf_memopt.planner.lengths import longest_sequences
    from hf_memopt.planner.plan import check_asked
    from hf_memopt.planner.settle import settle
    from hf_memopt.presets import METHODS

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
    print(
        f"{spec.model_name} on {spec.preset.hardware.label} ({gib(spec.memory)}): the longest sequence "
        f"predicted to fit in {PLAN_PROFILES['balanced'][1]:.0%} of it, one sample at a time"
    )
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


def run_frames(spec: JobSpec, frames: str, as_json: bool) -> int:
    """Print the most frames by the size of a frame; 0 if any fit, 1 if none do."""
    if frames != "max":
        raise InputError(
            f"--frames {frames}: the only value is max; for the memory of so many frames, run "
            f"`hf-memopt estimate --set max_frames={frames}`"
        )
    import_libraries()
    from hf_memopt.planner.frames import most_frames

    job = frames_job(spec)
    rows = [
        {
            "max_pixels_per_frame": fit.max_pixels_per_frame,
            "max_frames": fit.max_frames,
            "seq_len": fit.seq_len,
            "estimate": fit.estimate.to_dict(),
        }
        for fit in most_frames(job, note=progress)
    ]
    if as_json:
        print_json({"frames": rows, "training_arguments": job.fields, "capacity_bytes": job.device.memory})
    else:
        _print_frames(spec, job, rows)
    return 0 if any(row["max_frames"] for row in rows) else 1


def frames_job(spec: JobSpec):
    """The job with clips of one frame, whose number is varied: as `estimate` describes it."""
    from hf_memopt.estimator.spec_job import spec_job
    from hf_memopt.planner.devices import split_count

    name, devices = split_count(spec.hardware)
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
    print(
        f"{spec.model}, {method}, micro-batch {micro}, clips of {job.video.width} × {job.video.height} on "
        f"{job.device.label} ({gib(job.device.memory)}): the most frames predicted to fit in "
        f"{job.memory_args.target_memory_utilization:.0%} of it"
    )
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
    print_table("", columns, [tuple(map(str, row)) for row in table])
