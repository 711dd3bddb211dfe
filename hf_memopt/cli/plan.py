"""`hf-memopt plan`: the fastest settings that fit, or the most frames of a video."""

import sys
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memopt.cli.estimate import import_libraries
from hf_memopt.cli.output import print_json, print_table
from hf_memopt.cli.settings import JobSettings, parse_settings, quantization_config
from hf_memopt.errors import InputError, choose
from hf_memopt.files import folder_for
from hf_memopt.levers.arguments import RUNGS
from hf_memopt.presets import get_preset, list_presets
from hf_memopt.units import GIB, gib


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a command line asks to be planned; options that are left out are the preset's.

    Attributes:
        model: a bundled architecture's name, hub id, folder or config.json.
        hardware: a device, or several of it: rtx_4090x2.
        memory_gib, host_memory_gib: that may be used of each device, and of the host for each device.
        settings: KEY=VALUE, as `--set` takes them.
        export: folder to write a profile's files to.
        profile: the one to write: safe, balanced, aggressive or maximum.
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
    profile: str = "balanced"


def run_plan(options: PlanOptions, as_json: bool) -> int:
    """Print the profiles that fit; 0 if anything fits, 1 if nothing does."""
    if options.profile not in RUNGS:
        raise choose("profile", options.profile, RUNGS)
    if options.export:
        folder_for(options.export)
    import_libraries()
    from hf_memopt.planner.plan import plan

    settings = parse_settings(options.settings)
    if settings.quantization and options.method not in ("qlora", "any"):
        raise InputError("quantization.* applies to method=qlora only")
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
        **_model_arguments(options.model, settings),
    )
    written = _export(made, options.export, options.profile) if options.export and made.ladder else []
    if as_json:
        print_json(made.to_dict() | {"exported": written})
    else:
        _print_plan(made, written)
    return 0 if made.ladder else 1


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


def _export(made, directory: str, name: str) -> list[str]:
    """Write a profile's files; where it does not fit, the next safer one's that does."""
    from hf_memopt.planner.launch import write_files

    profile = next((rung for rung in made.ladder if rung.name == name), made.ladder[0])
    if profile.name != name:
        _log(f"nothing fits the profile {name}: writing {profile.name}")
    return write_files(made.request, profile, directory)


def _print_plan(made, written: list[str]) -> None:
    request = made.request
    preset = request.preset
    devices = f"{preset.processes} × " if preset.processes > 1 else ""
    method = f"{preset.method}, " if made.ladder else ""
    length = "videos" if request.more.get("video") is not None else f"{request.seq_len} tokens"
    print(
        f"{request.model}, {method}{request.effective_batch_size} samples a step of {length}, on {devices}"
        f"{preset.hardware.label} ({gib(request.memory)} each)"
    )
    if made.ladder:
        _print_profiles(made.ladder)
    if any(rung.choice.offloads for rung in made.ladder):
        most = max(rung.estimate.host_bytes for rung in made.ladder)
        print(
            f"host memory: up to {gib(most)} for each process, of {gib(request.host_memory)} "
            "(--host-memory sets the limit)"
        )
    if made.rejected:
        print_table(
            "left out", ("settings", "reason"), [(rejected.settings, rejected.reason) for rejected in made.rejected]
        )
    if made.ladder:
        from hf_memopt.planner.launch import launch_command

        best = next((rung for rung in made.ladder if rung.name == "balanced"), made.ladder[0])
        print(f"{best.name}:\n  {launch_command(request, best)}")
    else:
        _print_nearest(made)
    for note in made.notes:
        print(f"note: {note}")
    if written:
        print(f"wrote {', '.join(written)}")


def _print_profiles(ladder) -> None:
    """What each profile sets and is predicted to need."""
    rows = [
        (rung.name, f"{rung.share:.0%}", rung.summary, gib(rung.estimate.device_bytes), f"{rung.relative_speed:.2f}")
        for rung in ladder
    ]
    print_table("", ("profile", "fills", "settings", "predicted", "predicted speed"), rows)
    kinds = [
        kind for kind in ladder[0].estimate.breakdown if any(rung.estimate.breakdown[kind] > 2**20 for rung in ladder)
    ]
    rows = [("phase", *(rung.estimate.phase for rung in ladder))]
    rows += [(kind.replace("_", " "), *(gib(rung.estimate.breakdown[kind]) for rung in ladder)) for kind in kinds]
    print_table("at the peak", ("memory", *(rung.name for rung in ladder)), rows)


def _print_nearest(made) -> None:
    """How much memory is missing, and which changes would fit."""
    if made.missing_bytes:
        print(f"nothing fits: {gib(made.missing_bytes)} missing")
    else:
        print("nothing fits, and no estimate says how much memory is missing")
    for change in made.nearest:
        print(f"  would fit: {change}")


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
    if options.hardware != "auto" and options.hardware not in list_presets():
        raise choose("hardware", options.hardware, list_presets())
    import_libraries()
    from hf_memopt.planner.frames import most_frames

    job = _video_job(options)
    rows = [
        {
            "max_pixels_per_frame": fit.max_pixels_per_frame,
            "max_frames": fit.max_frames,
            "seq_len": fit.seq_len,
            "estimate": fit.estimate.to_dict(),
        }
        for fit in most_frames(job, note=lambda text: _log(f"estimating {text}"))
    ]
    if as_json:
        print_json({"frames": rows, "training_arguments": job.fields, "capacity_bytes": job.device.memory})
    else:
        _print_frames(options, job, rows)
    return 0 if any(row["max_frames"] for row in rows) else 1


def _video_job(options: FramesOptions):
    """The job with clips of one frame, whose number is varied."""
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.preset_estimates import preset_job
    from hf_memopt.levers.answer_logits import with_few_logits
    from hf_memopt.video.inputs import frozen_by_settings, video_inputs

    preset = get_preset(options.hardware, "full" if options.method == "any" else options.method)
    settings = parse_settings(options.settings)
    config = load_config(options.model)
    video = video_inputs(options.model, config, {"max_frames": 1, **settings.video})
    preset = replace(preset, dtype=settings.own.get("dtype", preset.dtype))
    return preset_job(
        preset,
        options.model,
        world_size=1,
        fields={"per_device_train_batch_size": 1, **settings.training},
        lora=settings.lora,
        video=video,
        frozen=frozen_by_settings(settings.video),
        attn_implementation=settings.own.get("attn_implementation"),
        memory_args=with_few_logits(settings.memory_args, config),  # as the recipe does
        quantization_config=quantization_config(preset, settings.quantization, config),
    )


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
