"""`hf-memopt plan --frames max`: the largest clips that fit a card."""

import sys
from dataclasses import replace

from hf_memopt.cli.estimate import import_libraries, quantization_config, split_settings
from hf_memopt.cli.output import print_json, print_table
from hf_memopt.errors import InputError, choose
from hf_memopt.hardware.catalog import gib
from hf_memopt.presets import get_preset, list_presets


def run_plan(model, frames, hardware, method, settings, as_json) -> int:
    """Print the most frames by the size of a frame; 0 if any fit, 1 if none do."""
    if frames != "max":
        raise InputError(f"--frames {frames}: only max is known; `hf-memopt estimate --set max_frames={frames}` tells "
                         "what so many need")  # fmt: skip
    if hardware != "auto" and hardware not in list_presets():
        raise choose("hardware", hardware, list_presets())
    import_libraries()
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.reference import job_of
    from hf_memopt.estimator.video import frozen_as_said, video_inputs
    from hf_memopt.levers.answer_logits import with_few_logits
    from hf_memopt.planner.frames import most_frames

    preset = get_preset(hardware, method)
    given, lora, quantization, own, memory_args, clips = split_settings(settings)
    config = load_config(model)
    video = video_inputs(model, config, {"max_frames": 1, **clips})
    memory_args = with_few_logits(memory_args, config)  # as the recipe does
    preset = replace(preset, dtype=own.get("dtype", preset.dtype))
    given = {"per_device_train_batch_size": 1, **given}
    job = job_of(
        preset, model, None, 1, given, lora, video=video,
        frozen=frozen_as_said(clips), attn_implementation=own.get("attn_implementation"), memory_args=memory_args,
        quantization_config=quantization_config(preset, quantization, config),
    )  # fmt: skip
    rows = []
    for fit in most_frames(job, note=lambda text: print(f"estimating {text}", file=sys.stderr)):
        rows.append({"max_pixels_per_frame": fit.max_pixels_per_frame, "max_frames": fit.max_frames,
                     "seq_len": fit.seq_len, "estimate": fit.estimate.to_dict()})  # fmt: skip
    if as_json:
        print_json({"frames": rows, "training_arguments": job.fields, "capacity_bytes": job.device.memory})
    else:
        _print(model, method, job, rows)
    return 0 if any(row["max_frames"] for row in rows) else 1


def _print(model, method, job, rows) -> None:
    micro = job.fields["per_device_train_batch_size"]
    print(f"{model}, {method}, micro-batch {micro}, clips of {job.video.width} × {job.video.height} on "
          f"{job.device.label} ({gib(job.device.memory)}): the most frames that are predicted to fit in "
          f"{job.memory_args.target_memory_utilization:.0%} of it")  # fmt: skip
    table = [(row["max_pixels_per_frame"] or "the model's own", row["max_frames"] or "none", row["seq_len"],
              gib(row["estimate"]["device_bytes"])) for row in rows]  # fmt: skip
    columns = ("--max_pixels_per_frame", "--max_frames", "tokens a sample", "predicted")
    print_table("", columns, [tuple(map(str, row)) for row in table])
