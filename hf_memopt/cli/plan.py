"""`hf-memopt plan`: the fastest settings that fit, or the largest clips."""

import sys
from dataclasses import replace

from hf_memopt.cli.estimate import import_libraries, quantization_config, split_settings
from hf_memopt.cli.output import print_json, print_table
from hf_memopt.errors import InputError, choose
from hf_memopt.files import folder_for
from hf_memopt.levers.arguments import RUNGS
from hf_memopt.presets import get_preset, list_presets
from hf_memopt.units import GIB, gib


def run_plan(
    model,
    hardware,
    seq_len,
    effective_batch_size,
    method,
    strategy,
    memory_gib,
    host_gib,
    settings,
    export_dir,
    rung,
    as_json,
) -> int:
    """Print the ladder; 0 if anything fits, 1 if nothing does."""
    if rung not in RUNGS:
        raise choose("rung", rung, RUNGS)
    if export_dir:
        folder_for(export_dir)
    import_libraries()
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.levers.answer_logits import with_few_logits
    from hf_memopt.planner.plan import plan
    from hf_memopt.video.inputs import frozen_as_said, video_inputs

    given, lora, quantization, own, memory_args, clips = split_settings(settings)
    config = load_config(model)
    video = video_inputs(model, config, clips)
    if video is not None and not any(word.startswith("logits_to_keep=") for word in settings):
        memory_args = with_few_logits(memory_args, config)
    if quantization and method not in ("qlora", "any"):
        raise InputError("quantization.* applies to method=qlora only")

    def packed(preset):
        changed = quantization if preset.method == "qlora" else {}
        return quantization_config(preset, changed, config if video else None)

    found = plan(
        model,
        hardware,
        effective_batch_size,
        seq_len,
        method,
        strategy,
        memory=_bytes(memory_gib),
        host_memory=_bytes(host_gib),
        training=given,
        lora=lora,
        memory_args=memory_args,
        quantization=packed,
        say=_say,
        video=video,
        frozen=frozen_as_said(clips) if video else (),
        **own,
    )
    written = _export(found, export_dir, rung) if export_dir and found.ladder else []
    if as_json:
        print_json(found.to_dict() | {"exported": written})
    else:
        _print_plan(found, written)
    return 0 if found.ladder else 1


def _bytes(size: float | None) -> int | None:
    return None if size is None else int(size * GIB)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _export(found, directory: str, name: str) -> list[str]:
    """Write a rung's files; where it does not fit, the next safer one's that does."""
    from hf_memopt.planner.launch import write_files

    names = [rung.name for rung in found.ladder]
    chosen = next((rung for rung in found.ladder if rung.name == name), found.ladder[0])
    if name not in names:
        _say(f"nothing fits the rung {name}: writing {chosen.name}")
    return write_files(found.request, chosen, directory)


def _print_plan(found, written: list[str]) -> None:
    request = found.request
    preset = request.preset
    devices = f"{preset.processes} × " if preset.processes > 1 else ""
    method = f"{preset.method}, " if found.ladder else ""
    length = "videos" if request.more.get("video") is not None else f"{request.seq_len} tokens"
    print(
        f"{request.model}, {method}{request.effective_batch_size} samples a step of {length}, on {devices}"
        f"{preset.hardware.label} ({gib(request.memory)} each)"
    )
    if found.ladder:
        rows = [
            (
                rung.name,
                f"{rung.share:.0%}",
                rung.summary,
                gib(rung.estimate.device_bytes),
                f"{rung.relative_speed:.2f}",
            )
            for rung in found.ladder
        ]
        print_table("", ("rung", "fills", "settings", "predicted", "predicted speed"), rows)
        kinds = [
            kind
            for kind in found.ladder[0].estimate.breakdown
            if any(rung.estimate.breakdown[kind] > 2**20 for rung in found.ladder)
        ]
        rows = [("in", *(rung.estimate.phase for rung in found.ladder))]
        rows += [
            (kind.replace("_", " "), *(gib(rung.estimate.breakdown[kind]) for rung in found.ladder)) for kind in kinds
        ]
        print_table("at the peak", ("what", *(rung.name for rung in found.ladder)), rows)
    if any(rung.choice.offloads for rung in found.ladder):
        most = max(rung.estimate.host_bytes for rung in found.ladder)
        print(f"host memory: up to {gib(most)} a process, of {gib(request.host_memory)} (--host-memory says how much)")
    if found.rejected:
        print_table("left out", ("what", "why"), [(one.settings, one.reason) for one in found.rejected])
    if found.ladder:
        from hf_memopt.planner.launch import launch_command

        best = next((rung for rung in found.ladder if rung.name == "balanced"), found.ladder[0])
        print(f"{best.name}:\n  {launch_command(request, best)}")
    else:
        missing = gib(found.missing_bytes) if found.missing_bytes else "more memory than can be told"
        print(f"nothing fits: {missing} missing")
        for change in found.nearest:
            print(f"  would fit: {change}")
    if written:
        print(f"wrote {', '.join(written)}")


def run_frames(model, frames, hardware, method, settings, as_json) -> int:
    """Print the most frames by the size of a frame; 0 if any fit, 1 if none do."""
    if frames != "max":
        raise InputError(
            f"--frames {frames}: only max is known; `hf-memopt estimate --set max_frames={frames}` tells "
            "what so many need"
        )
    if hardware != "auto" and hardware not in list_presets():
        raise choose("hardware", hardware, list_presets())
    method = "full" if method == "any" else method
    import_libraries()
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.preset_estimates import preset_job
    from hf_memopt.levers.answer_logits import with_few_logits
    from hf_memopt.planner.frames import most_frames
    from hf_memopt.video.inputs import frozen_as_said, video_inputs

    preset = get_preset(hardware, method)
    given, lora, quantization, own, memory_args, clips = split_settings(settings)
    config = load_config(model)
    video = video_inputs(model, config, {"max_frames": 1, **clips})
    memory_args = with_few_logits(memory_args, config)  # as the recipe does
    preset = replace(preset, dtype=own.get("dtype", preset.dtype))
    given = {"per_device_train_batch_size": 1, **given}
    job = preset_job(
        preset,
        model,
        world_size=1,
        fields=given,
        lora=lora,
        video=video,
        frozen=frozen_as_said(clips),
        attn_implementation=own.get("attn_implementation"),
        memory_args=memory_args,
        quantization_config=quantization_config(preset, quantization, config),
    )
    rows = []
    for fit in most_frames(job, note=lambda text: print(f"estimating {text}", file=sys.stderr)):
        rows.append(
            {
                "max_pixels_per_frame": fit.max_pixels_per_frame,
                "max_frames": fit.max_frames,
                "seq_len": fit.seq_len,
                "estimate": fit.estimate.to_dict(),
            }
        )
    if as_json:
        print_json({"frames": rows, "training_arguments": job.fields, "capacity_bytes": job.device.memory})
    else:
        _print_frames(model, method, job, rows)
    return 0 if any(row["max_frames"] for row in rows) else 1


def _print_frames(model, method, job, rows) -> None:
    micro = job.fields["per_device_train_batch_size"]
    print(
        f"{model}, {method}, micro-batch {micro}, clips of {job.video.width} × {job.video.height} on "
        f"{job.device.label} ({gib(job.device.memory)}): the most frames that are predicted to fit in "
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
    columns = ("--max_pixels_per_frame", "--max_frames", "tokens a sample", "predicted")
    print_table("", columns, [tuple(map(str, row)) for row in table])
