"""`hf-memopt estimate` and `hf-memopt dry-run`: will it fit, before anything runs."""

import gc
from dataclasses import asdict, replace
from typing import Any

from hf_memopt.cli.output import print_json, print_table, working
from hf_memopt.errors import InputError, choose
from hf_memopt.field_values import fit, hints_of
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.presets import DTYPES, Preset, get_preset
from hf_memopt.presets.quantization import check_quantization
from hf_memopt.units import gib
from hf_memopt.yaml_values import read_yaml

_OWN = {
    "dtype": str,
    "attn_implementation": str | None,
    "task": str | None,
    "kbit_preparation": bool,
    "padded": bool,
    "packed": bool,
}
_VIDEO = {
    "max_frames": int,
    "frame_size": str,
    "max_pixels_per_frame": int | None,
    "answer_tokens": int,
    "freeze_vision": bool,
    "freeze_projector": bool,
}


def run_estimate(
    model, preset_name, method, seq_len, world_size, strategy, hardware, settings, levers, plot_file, as_json
) -> int:
    """Print the estimate; 0 if it fits or cannot be told, 1 if it does not fit."""
    import_libraries()
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.suggestions import largest_savings
    from hf_memopt.estimator.tracing.parallel import on_all_cores

    preset, job = job_as_told(model, preset_name, method, seq_len, world_size, strategy, hardware, settings)
    working(f"tracing the steps of {model}")
    found = estimate_job(job, on_all_cores)
    if levers or found.fits is False:
        working("estimating what would save most")
    savings = largest_savings(job, found, map_fn=on_all_cores) if levers or found.fits is False else []
    if plot_file:
        from hf_memopt.estimator.plot import plot

        plot(found, plot_file, f"{model}, {method}, {job.seq_len} tokens, {job.device.label}")
    if as_json:
        print_json(found.to_dict() | {"levers": [asdict(saving) for saving in savings]})
    else:
        batch = f"{job.batch['input_ids'][0][0]} × {job.seq_len} tokens"
        devices = f"{job.world_size} × " if job.world_size > 1 else ""
        _print(f"{model}, {preset.method}, {batch} on {devices}{job.device.label}", found, savings)
    return 1 if found.fits is False else 0


def job_as_told(model, preset_name, method, seq_len, world_size, strategy, hardware, settings):
    """The preset and the job that a command line describes.

    Raises:
        InputError: something of it cannot be used.
    """
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.preset_estimates import preset_job
    from hf_memopt.estimator.smaller import with_sizes
    from hf_memopt.hardware import get_hardware
    from hf_memopt.levers.answer_logits import with_few_logits
    from hf_memopt.video.inputs import frozen_as_said, video_inputs

    preset = get_preset(preset_name, method, strategy)
    settings, sizes = without_model_sizes(settings)
    given, lora, quantization, own, memory_args, clips = split_settings(settings)
    preset = replace(preset, dtype=own.get("dtype", preset.dtype))
    device = get_hardware(hardware) if hardware else preset.hardware
    world_size = preset.processes if world_size is None else world_size
    config = load_config(model)
    if sizes:
        model = config = with_sizes(config, sizes)
    video = video_inputs(model, config, clips)
    if video is not None and not any(word.startswith("logits_to_keep=") for word in settings):
        memory_args = with_few_logits(memory_args, config)  # as the recipe does
    job = preset_job(
        preset,
        model,
        seq_len=seq_len,
        world_size=world_size,
        fields=given,
        lora=lora,
        hardware=device,
        task=own.get("task"),
        video=video,
        frozen=frozen_as_said(clips) if video else (),
        attn_implementation=own.get("attn_implementation"),
        kbit_preparation=bool(own.get("kbit_preparation")),
        quantization_config=quantization_config(preset, quantization, config if video else None),
        memory_args=memory_args,
        padded=bool(own.get("padded")),
        packed=bool(own.get("packed")),
    )
    return preset, job


def run_dry_run(script, arguments, hardware, world_size, plot_file, as_json) -> int:
    """Print the estimate of a script's job; 0 if it fits or cannot be told, 1 if it does not fit."""
    from hf_memopt.estimator import estimate_trainer
    from hf_memopt.estimator.dry_run import catch_trainer

    found = estimate_trainer(catch_trainer(script, arguments), hardware, world_size)
    if plot_file:
        from hf_memopt.estimator.plot import plot

        plot(found, plot_file, script)
    if as_json:
        print_json(found.to_dict())
    else:
        _print(script, found, [])
    return 1 if found.fits is False else 0


def import_libraries() -> None:
    """Collecting garbage while thousands of modules are made takes half a second and finds none.

    The modules stay frozen: this is the command's own process.
    """
    working("loading transformers")
    gc.disable()
    try:
        import peft  # noqa: F401
        from transformers import Trainer  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def quantization_config(preset: Preset, changed: dict[str, Any], video_config=None):
    """The preset's BitsAndBytesConfig with changed fields; None where the method is another.

    Args:
        video_config: of a model whose vision tower stays as it is.
    """
    if preset.method != "qlora":
        if changed:
            raise InputError("quantization.* applies to method=qlora only")
        return None
    from transformers import BitsAndBytesConfig

    settings = {**preset.quantization(), **changed}
    if video_config is not None:
        from transformers import AutoModelForImageTextToText

        from hf_memopt.video.model_parts import not_quantized

        settings.setdefault("llm_int8_skip_modules", not_quantized(video_config, AutoModelForImageTextToText))
    return BitsAndBytesConfig(**settings)


def without_model_sizes(settings: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The KEY=VALUE words of other things, and those of model.KEY as fields of the model's configuration."""
    sizes = {}
    for word in settings:
        key, equals, text = word.partition("=")
        if equals and key.startswith("model."):
            sizes[key.removeprefix("model.")] = read_yaml(text, f"--set {key}")
    return [word for word in settings if not (word.startswith("model.") and "=" in word)], sizes


def split_settings(settings: list[str]) -> tuple[dict, dict, dict, dict, MemoryArguments, dict]:
    """KEY=VALUE words: TrainingArguments fields, LoraConfig fields, BitsAndBytesConfig fields, what is neither,
    MemoryArguments, and what is said of videos."""
    found: dict[str, dict[str, Any]] = {"": {}, "lora": {}, "quantization": {}, "own": {}, "memory": {}, "video": {}}
    for word in settings:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"--set {word}: write it as KEY=VALUE")
        prefix, dot, name = key.partition(".")
        if dot and prefix not in ("lora", "quantization"):
            hint = ", and model. with estimate alone: give plan a config.json" if prefix == "model" else ""
            raise InputError(f"--set {word}: only lora. and quantization. have keys of their own{hint}")
        groups = {"own": _OWN, "memory": MemoryArguments.names(), "video": _VIDEO}
        group = prefix if dot else next((group for group, keys in groups.items() if key in keys), "")
        found[group][name if dot else key] = read_yaml(text, f"--set {key}")
    own, video = fit(_OWN, found["own"], "--set "), fit(_VIDEO, found["video"], "--set ")
    if own.get("dtype") is not None and own["dtype"] not in DTYPES:
        raise choose("dtype", own["dtype"], DTYPES)
    memory = MemoryArguments(**fit(hints_of(MemoryArguments), found["memory"], "--set "))
    return found[""], found["lora"], check_quantization(found["quantization"]), own, memory, video


def _print(job: str, found, savings) -> None:
    verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[found.fits]
    print(f"{job}: {gib(found.device_bytes)} of {gib(found.capacity_bytes)} predicted, {verdict}")
    rows = [(kind.replace("_", " "), gib(size)) for kind, size in found.breakdown.items() if size]
    print_table(f"at the peak, in {found.phase}", ("what", "predicted"), rows)
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
    totals = [(name.removesuffix("_bytes").replace("_", " "), gib(getattr(found, name))) for name in names]
    print_table("altogether", ("what", "predicted"), totals)
    if savings:
        rows = [(one.change, gib(one.saved_bytes), {True: "yes", False: "no", None: ""}[one.fits]) for one in savings]
        print_table("what would save most", ("change", "predicted saving", "then it fits"), rows)
    for note in found.notes:
        print(f"note: {note}")
