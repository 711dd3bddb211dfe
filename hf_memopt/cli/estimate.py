"""`hf-memopt estimate` and `hf-memopt dry-run`: will it fit, before anything runs."""

import gc
from dataclasses import asdict, dataclass, field, replace

from hf_memopt.cli.output import print_json, print_table, working
from hf_memopt.cli.settings import parse_settings, quantization_config, split_model_sizes
from hf_memopt.presets import get_preset
from hf_memopt.units import gib


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """The job that a command line asks about; options that are left out are the preset's.

    Attributes:
        model: a bundled architecture's name, hub id, folder or config.json.
        hardware: the device to fit on.
        settings: KEY=VALUE, as `--set` takes them.
    """

    model: str
    preset: str = "auto"
    method: str = "full"
    seq_len: int | None = None
    world_size: int | None = None
    strategy: str | None = None
    hardware: str | None = None
    settings: list[str] = field(default_factory=list)


def run_estimate(options: JobOptions, levers: bool, plot_file: str | None, as_json: bool) -> int:
    """Print the estimate; 0 if the job fits or the capacity is unknown, 1 if it does not fit."""
    import_libraries()
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.suggestions import largest_savings
    from hf_memopt.estimator.tracing.parallel import on_all_cores

    preset, job = resolve_job(options)
    working(f"tracing the steps of {options.model}")
    estimate = estimate_job(job, on_all_cores)
    savings = []
    if levers or estimate.fits is False:
        working("estimating which changes save most")
        savings = largest_savings(job, estimate, map_fn=on_all_cores)
    if plot_file:
        from hf_memopt.estimator.plot import plot

        plot(estimate, plot_file, f"{options.model}, {options.method}, {job.seq_len} tokens, {job.device.label}")
    if as_json:
        print_json(estimate.to_dict() | {"levers": [asdict(saving) for saving in savings]})
    else:
        batch = f"{job.batch['input_ids'][0][0]} × {job.seq_len} tokens"
        devices = f"{job.world_size} × " if job.world_size > 1 else ""
        _print(f"{options.model}, {preset.method}, {batch} on {devices}{job.device.label}", estimate, savings)
    return 1 if estimate.fits is False else 0


def resolve_job(options: JobOptions):
    """The Preset and the Job that a command line asks about.

    Raises:
        InputError: an option or setting that cannot be used.
    """
    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.estimator.preset_estimates import preset_job
    from hf_memopt.estimator.smaller import with_sizes
    from hf_memopt.hardware import get_hardware
    from hf_memopt.video.inputs import frozen_by_settings, video_inputs

    preset = get_preset(options.preset, options.method, options.strategy)
    texts, sizes = split_model_sizes(options.settings)
    settings = parse_settings(texts)
    own = settings.own
    preset = replace(preset, dtype=own.get("dtype", preset.dtype))
    model = options.model
    config = load_config(model)
    if sizes:
        model = config = with_sizes(config, sizes)
    video = video_inputs(model, config, settings.video)
    job = preset_job(
        preset,
        model,
        seq_len=options.seq_len,
        world_size=preset.processes if options.world_size is None else options.world_size,
        fields=settings.training,
        lora=settings.lora,
        hardware=get_hardware(options.hardware) if options.hardware else preset.hardware,
        task=own.get("task"),
        video=video,
        frozen=frozen_by_settings(settings.video) if video else (),
        attn_implementation=own.get("attn_implementation"),
        kbit_preparation=bool(own.get("kbit_preparation")),
        quantization_config=quantization_config(preset, settings.quantization, config if video else None),
        memory_args=settings.video_memory_args(config) if video else settings.memory_args,
        padded=bool(own.get("padded")),
        packed=bool(own.get("packed")),
    )
    return preset, job


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """A script to run up to trainer.train(), its own arguments, and the devices to fit on."""

    script: str
    arguments: list[str] = field(default_factory=list)
    hardware: str = "auto"
    world_size: int | None = None


def run_dry_run(options: DryRunOptions, plot_file: str | None, as_json: bool) -> int:
    """Print the estimate of a script's job; 0 if it fits or the capacity is unknown, 1 if it does not fit."""
    from hf_memopt.estimator import estimate_trainer
    from hf_memopt.estimator.dry_run import catch_trainer

    trainer = catch_trainer(options.script, options.arguments)
    estimate = estimate_trainer(trainer, options.hardware, options.world_size)
    if plot_file:
        from hf_memopt.estimator.plot import plot

        plot(estimate, plot_file, options.script)
    if as_json:
        print_json(estimate.to_dict())
    else:
        _print(options.script, estimate, [])
    return 1 if estimate.fits is False else 0


def import_libraries() -> None:
    """Import peft and transformers' Trainer without garbage collection, which takes half a second here and frees none.

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


def _print(job: str, estimate, savings) -> None:
    verdict = {True: "fits", False: "does not fit", None: "capacity unknown"}[estimate.fits]
    print(f"{job}: {gib(estimate.device_bytes)} of {gib(estimate.capacity_bytes)} predicted, {verdict}")
    rows = [(kind.replace("_", " "), gib(size)) for kind, size in estimate.breakdown.items() if size]
    print_table(f"at the peak, in {estimate.phase}", ("memory", "predicted"), rows)
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "host_bytes")
    totals = [(name.removesuffix("_bytes").replace("_", " "), gib(getattr(estimate, name))) for name in names]
    print_table("in total", ("memory", "predicted"), totals)
    if savings:
        fits = {True: "yes", False: "no", None: ""}
        rows = [(saving.change, gib(saving.saved_bytes), fits[saving.fits]) for saving in savings]
        print_table("changes that save most", ("change", "predicted saving", "then fits"), rows)
    for note in estimate.notes:
        print(f"note: {note}")
