"""`hf-memopt plan`: the fastest settings that fit, or the most frames of a video."""

import itertools
import sys
from dataclasses import dataclass, field
from typing import Any

from hf_memopt.cli.cards import CardOptions, run_cards
from hf_memopt.cli.estimate import JobOptions, import_libraries, resolve_job
from hf_memopt.cli.output import print_json, print_table
from hf_memopt.cli.settings import JobSettings, parse_settings, quantization_config, refuse_second_answers
from hf_memopt.cli.speed import AmountOptions, print_profile_speeds, to_dict
from hf_memopt.errors import InputError, choose
from hf_memopt.files import folder_for
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.packages import missing_for
from hf_memopt.presets.quantization import check_4bit
from hf_memopt.terminal import say
from hf_memopt.units import GIB, gib, size


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a command line asks to be planned; options that are left out are the preset's.

    Attributes:
        model: a bundled architecture's name, hub id, folder or config.json.
        hardware: a device, or several of it: rtx_4090x2.
        memory_gib, host_memory_gib: that may be used of each device, and of the host for each device.
        settings: KEY=VALUE, as `--set` takes them.
        export: folder to write a profile's files to.
        overwrite: replace the files of another export there.
        profile: the one to write: safe, balanced, aggressive or maximum.
        amount: how much is trained, for time and cost.
        task: None for what the model is for.
    """

    model: str
    hardware: str = "auto"
    seq_len: int | None = None
    effective_batch_size: int | None = None
    method: str = "any"
    strategy: str | None = None
    memory_gib: float | None = None
    host_memory_gib: float | None = None
    settings: list[str] = field(default_factory=list)
    export: str | None = None
    overwrite: bool = False
    profile: str = "balanced"
    amount: AmountOptions = field(default_factory=AmountOptions)
    task: str | None = None


def run_which_card(options: PlanOptions, cards: CardOptions, as_json: bool) -> int:
    """Print the cards on which the job trains; 0 if there are any, 1 if there are none."""
    single = {"--memory": options.memory_gib, "--strategy": options.strategy, "--export": options.export}
    single["--price"] = options.amount.price
    for name in (name for name, value in single.items() if value is not None):
        raise InputError(f"{name} belongs to one card: name it with --hardware, or leave {name} out")
    import_libraries()
    from hf_memopt.estimator.tracing.tasks import TRL

    settings = parse_settings(options.settings)
    refuse_second_answers(options, settings)
    _check_quantization(settings, options.method)
    if (task := _task(options, settings).get("task")) in TRL:
        raise InputError(f"task={task} is planned for one card: name it with --hardware")
    arguments = {
        "model": options.model,
        "effective_batch_size": options.effective_batch_size,
        "seq_len": options.seq_len,
        "method": options.method,
        "host_memory": _bytes(options.host_memory_gib),
        "training": settings.training,
        "lora": settings.lora,
        "say": _log,
        **_model_arguments(options.model, settings),
        **_task(options, settings),
    }
    return run_cards(arguments, cards, as_json)


def _check_quantization(settings: JobSettings, method: str) -> None:
    if settings.quantization and method not in ("qlora", "any"):
        raise InputError("quantization.* applies to method=qlora only")
    check_4bit(settings.quantization)


def run_plan(options: PlanOptions, as_json: bool) -> int:
    """Print the profiles that fit; 0 if anything fits, 1 if nothing does."""
    if options.profile not in PLAN_PROFILES:
        raise choose("profile", options.profile, PLAN_PROFILES)
    if options.export:
        folder_for(options.export)
    import_libraries()
    options.amount.read()
    from hf_memopt.planner.plan import plan

    settings = parse_settings(options.settings)
    refuse_second_answers(options, settings)
    _check_quantization(settings, options.method)
    made = plan(
        options.model,
        options.hardware,
        options.effective_batch_size,
        options.seq_len,
        options.method,
        options.strategy,
        memory=_bytes(options.memory_gib),
        host_memory=_bytes(options.host_memory_gib),
        training=settings.training,
        lora=settings.lora,
        say=_log,
        **_model_arguments(options.model, settings) | _task(options, settings),
    )
    written = _export(made, options) if options.export and made.profiles else []
    if as_json:
        print_json(made.to_dict() | {"exported": written, "durations": _durations(made, options.amount)})
    else:
        _print_plan(made, written, options.amount)
    return 0 if made.profiles else 1


def _task(options: PlanOptions, settings: JobSettings) -> dict[str, str]:
    """The task that an option or a setting names."""
    task = options.task or settings.own.get("task")
    return {"task": task} if task else {}


def _model_arguments(model: str, settings: JobSettings) -> dict[str, Any]:
    """Those of plan()'s arguments that depend on whether the model takes videos."""
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.video.inputs import frozen_by_settings, video_inputs

    config = load_config(model)
    video = video_inputs(model, config, settings.video)

    def quantize(preset):
        changed = settings.quantization if preset.method == "qlora" else {}
        return quantization_config(preset, changed, config if video else None)

    return {
        "memory_args": settings.video_memory_args(config) if video else settings.memory_args,
        "quantization": quantize,
        "video": video,
        "frozen": frozen_by_settings(settings.video) if video else (),
        **settings.own,
    }


def _bytes(size: float | None) -> int | None:
    return None if size is None else int(size * GIB)


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _export(made, options: PlanOptions) -> list[str]:
    """Write a profile's files; where it does not fit, the next safer one's that does."""
    from hf_memopt.planner.launch import write_files

    profile = next((profile for profile in made.profiles if profile.name == options.profile), made.profiles[0])
    if profile.name != options.profile:
        _log(f"nothing fits the profile {options.profile}: writing {profile.name}")
    return write_files(made.request, profile, options.export, options.overwrite)


def _durations(made, amount: AmountOptions) -> dict[str, Any]:
    """Time and cost by profile; None where nobody asks, or where the speed is unknown."""
    request = made.request
    return {
        profile.name: to_dict(
            profile.estimate, amount.time_and_cost(profile.estimate, request.seq_len, request.preset.processes)
        )
        for profile in made.profiles
    }


def _print_plan(made, written: list[str], amount: AmountOptions) -> None:
    request = made.request
    preset = request.preset
    devices = f"{preset.processes} × " if preset.processes > 1 else ""
    method = f"{preset.method}, " if made.profiles else ""
    length = "videos" if request.more.get("video") is not None else f"{request.seq_len} tokens"
    print(
        f"{request.model}, {method}{request.effective_batch_size} samples a step of {length}, on {devices}"
        f"{preset.hardware.label} ({gib(request.memory)} each)"
    )
    if made.profiles:
        _print_profiles(made)
        print_profile_speeds(_by_settings(made.profiles), amount, request.seq_len, preset.processes)
        _print_methods(made)
        say(_host_memory(made))
    if made.rejected:
        print_table(
            "left out", ("settings", "reason"), [(rejected.settings, rejected.reason) for rejected in made.rejected]
        )
    if made.profiles:
        from hf_memopt.planner.plan import usual_profile

        _print_start(request, usual_profile(made.profiles))
    else:
        _print_nearest(made)
    for note in made.notes:
        say(f"note: {note}")
    if written:
        print(f"wrote {', '.join(written)}")


def _print_start(request, profile) -> None:
    """The command that starts a profile; where there is no recipe, the fields for a script of one's own."""
    from hf_memopt.planner.launch import (
        has_recipe,
        launch_command,
        memory_settings,
        recipe_name,
        training_arguments,
    )

    if has_recipe(request):
        print(f"{profile.name}:\n  {launch_command(request, profile)}")
        if missing := missing_for(recipe_name(request), profile.preset.strategy):
            print(f"note: {missing}")
        return
    print(f"{profile.name}, for your own script:")
    for name, fields in (
        (request.trl.row.config if request.trl else "TrainingArguments", training_arguments(request, profile)),
        ("MemoryArguments", memory_settings(profile)),
    ):
        values = ", ".join(f"{key}={value!r}" for key, value in sorted(fields.items()))
        print(f"  {name}({values})")


def _by_settings(profiles) -> list[list]:
    """The profiles, those with the same settings together."""
    return [list(group) for _, group in itertools.groupby(profiles, lambda profile: profile.choice)]


def _print_profiles(made) -> None:
    """What each profile sets and is predicted to need; profiles with the same settings are one row."""
    groups = _by_settings(made.profiles)
    rows = [
        (
            " = ".join(profile.name for profile in group),
            " ".join(f"{profile.share:.0%}" for profile in group),
            group[0].summary,
            size(group[0].estimate.device_bytes),
            _speed(group[0].tokens_per_second),
        )
        for group in groups
    ]
    if made.plain:
        rows.append(_plain_row(made.plain))
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
    print_table("at the peak", ("memory", *(" = ".join(profile.name for profile in group) for group in groups)), rows)


def _plain_row(plain) -> tuple[str, ...]:
    """The row of the settings without host memory and rounding, and what they lose."""
    about = "" if plain.estimated else "about "
    predicted = f"{about}{size(plain.device_bytes)}"
    if not plain.fits:
        return "plain alternative", "", plain.settings, f"{predicted}: does not fit", ""
    speed = f"{_speed(plain.tokens_per_second)} ({plain.relative_time:.2f} × the time)"
    return "plain alternative", "", plain.settings, predicted, speed


def _print_methods(made) -> None:
    """The methods that fit, beside each other, where the plan chose one."""
    if len(made.methods) < 2:
        return
    rows = [
        (
            f"{one.method} (planned)" if one.method == made.request.preset.method else one.method,
            one.settings,
            f"{'' if one.estimated else 'about '}{size(one.device_bytes)}",
            _speed(one.tokens_per_second),
        )
        for one in made.methods
    ]
    print_table("methods that fit", ("method", "settings", "predicted", "tokens/s"), rows)


def _host_memory(made) -> str:
    """What the host must have, and what it is taken to have."""
    host, most = made.request.host_memory, max(profile.estimate.host_bytes for profile in made.profiles)
    short = "" if most <= host.bytes else ": too little to load the weights through, where that holds"
    origin = f"assumed ({host.source})" if host.assumed else f"there ({host.source})"
    return (
        f"host memory: {gib(most)} needed for each process, of {gib(host.bytes)} {origin}{short}; "
        "--host-memory says how much there is"
    )


def _speed(tokens_per_second: float | None) -> str:
    from hf_memopt.estimator.duration import two_digits

    return "unknown" if tokens_per_second is None else two_digits(tokens_per_second)


def _print_nearest(made) -> None:
    """How much memory is missing, and which changes would fit."""
    if made.missing_bytes:
        print(f"nothing fits: {gib(made.missing_bytes)} missing")
    else:
        print("nothing fits, and no estimate says how much memory is missing")
    for change in made.nearest:
        print(f"  would fit: {change}")


def run_lengths(options: PlanOptions, as_json: bool) -> int:
    """Print the longest sequences by memory features; 0 if any fits, 1 if none does."""
    for name, value in (("--export", options.export), ("--strategy", options.strategy)):
        if value is not None:
            raise InputError(f"--seq-len max is a question of one device's memory: leave {name} out")
    import_libraries()
    from hf_memopt.planner.lengths import longest_sequences
    from hf_memopt.planner.plan import ask
    from hf_memopt.presets import METHODS

    settings = parse_settings(options.settings)
    refuse_second_answers(options, settings)
    _check_quantization(settings, options.method)
    more = _model_arguments(options.model, settings) | _task(options, settings)
    question = ask(
        options.model,
        options.method,
        training=settings.training,
        lora=settings.lora,
        memory_args=more.pop("memory_args"),
        quantization=more.pop("quantization"),
        more=more,
        hardware=options.hardware,
        effective_batch_size=options.effective_batch_size,
        memory=_bytes(options.memory_gib),
        host_memory=_bytes(options.host_memory_gib),
    )
    methods = METHODS if options.method == "any" else (options.method,)
    requests = [question.for_method(method) for method in methods]
    found = [(request.preset.method, row) for request in requests for row in longest_sequences(request, _log)]
    if as_json:
        rows = [{"method": method, **vars(row), "estimate": row.estimate.to_dict()} for method, row in found]
        print_json({"lengths": rows, "capacity_bytes": requests[0].memory})
    else:
        _print_lengths(requests[0], found)
    return 0 if any(row.seq_len for _, row in found) else 1


def _print_lengths(request, found) -> None:
    print(
        f"{request.model_name} on {request.preset.hardware.label} ({gib(request.memory)}): the longest sequence "
        f"predicted to fit in {PLAN_PROFILES['balanced'][1]:.0%} of it, one sample at a time"
    )
    if not found:
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
        for method, row in found
    ]
    print_table("", ("method", "settings", "tokens", "limit", "device", "host", "tokens/s"), table)


@dataclass(frozen=True, kw_only=True)
class FramesOptions:
    """A video model of which the most frames that fit are asked for."""

    model: str
    frames: str
    hardware: str = "auto"
    method: str = "any"
    settings: list[str] = field(default_factory=list)


def run_frames(options: FramesOptions, as_json: bool) -> int:
    """Print the most frames by the size of a frame; 0 if any fit, 1 if none do."""
    if options.frames != "max":
        raise InputError(
            f"--frames {options.frames}: the only value is max; for the memory of so many frames, run "
            f"`hf-memopt estimate --set max_frames={options.frames}`"
        )
    import_libraries()
    from hf_memopt.planner.frames import most_frames

    job = frames_job(options)
    rows = [
        {
            "max_pixels_per_frame": fit.max_pixels_per_frame,
            "max_frames": fit.max_frames,
            "seq_len": fit.seq_len,
            "estimate": fit.estimate.to_dict(),
        }
        for fit in most_frames(job, note=_log)
    ]
    if as_json:
        print_json({"frames": rows, "training_arguments": job.fields, "capacity_bytes": job.device.memory})
    else:
        _print_frames(options, job, rows)
    return 0 if any(row["max_frames"] for row in rows) else 1


def frames_job(options: FramesOptions):
    """The job with clips of one frame, whose number is varied: as `estimate` describes it."""
    from hf_memopt.planner.devices import split_count

    name, devices = split_count(options.hardware)
    usual = ("max_frames=1", "per_device_train_batch_size=1")
    named = {setting.partition("=")[0] for setting in options.settings}
    asked = JobOptions(
        model=options.model,
        preset=name,
        method="full" if options.method == "any" else options.method,
        world_size=devices,
        settings=[setting for setting in usual if setting.split("=")[0] not in named] + options.settings,
    )
    _, job = resolve_job(asked)
    return job


def _print_frames(options: FramesOptions, job, rows) -> None:
    micro = job.fields["per_device_train_batch_size"]
    method = "full" if options.method == "any" else options.method
    print(
        f"{options.model}, {method}, micro-batch {micro}, clips of {job.video.width} × {job.video.height} on "
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
