"""`hf-memopt estimate` and `hf-memopt dry-run`: will it fit, before anything runs."""

import gc
import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn
from unittest import mock

from hf_memopt import charts
from hf_memopt.cli.estimate_printed import EstimatedJob
from hf_memopt.cli.output import print_json, working
from hf_memopt.cli.speed_printed import AmountOptions, to_dict
from hf_memopt.cli.words import check_words
from hf_memopt.confined.hub import serve
from hf_memopt.confined.process import run_confined
from hf_memopt.confined.rights import cannot_confine, may_have_card
from hf_memopt.errors import ImpossibleEstimate, IncompatibleLibrary, InputError, one_line
from hf_memopt.files import read_bytes, write_whole
from hf_memopt.foreign.launchers import Launch
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.job.spec import JobSpec
from hf_memopt.packages import require
from hf_memopt.planner.devices import with_device_count
from hf_memopt.presets import Preset, list_presets, preset_by_name
from hf_memopt.presets.named_presets import nearest_preset, plain_settings
from hf_memopt.terminal import say

_LARGEST_PLOT = 2**26  # bytes


def run_estimate(
    spec: JobSpec,
    levers: bool,
    plot_file: str | None,
    as_json: bool,
    amount: AmountOptions,
    verbose: bool,
    log: str | None,
) -> int:
    """Print the estimate; 0 if the job fits or the capacity is unknown, 1 if it does not fit."""
    if plot_file:
        require("matplotlib", "--plot")
    amount.read()
    spec = check_words(_with_device_count(spec))
    if "auto" not in (spec.preset, spec.hardware) and (spec.preset or spec.hardware):
        _choose_preset(spec)  # it refuses what does not go together
    import_libraries()
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.spec_job import spec_job
    from hf_memopt.estimator.suggestions import largest_savings
    from hf_memopt.estimator.timing.own_runs import learn_from_log
    from hf_memopt.estimator.tracing.parallel import on_all_cores
    from hf_memopt.estimator.trainer_job import TrainerJob

    working(f"reading the configuration of {spec.model}")  # of the hub, perhaps
    asked, spec = spec, settle_job(spec)
    _say_task(spec)
    preset, job = spec.preset, spec_job(spec)
    working(f"tracing the steps of {spec.model}")
    estimate = estimate_job(job, on_all_cores)
    micro, accumulation = (
        job.fields.get(name, usual)
        for name, usual in (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1))
    )
    savings = []
    if estimate.fits is False:
        from hf_memopt.cli.changes import fitting_changes

        savings = fitting_changes(asked, spec, job, micro * accumulation, estimate, settle_job)
    if levers and not isinstance(job, TrainerJob):  # a Trainer's batch is made
        working("estimating which changes save most")
        savings += largest_savings(job, estimate, map_fn=on_all_cores)
    if plot_file:
        _plot(estimate, plot_file, f"{spec.model}, {spec.method}, {_batch_in_words(job)}, {job.device.label}")
    settings, sizes = _describe_settings(preset)
    samples = micro * accumulation * job.world_size
    took = amount.time_and_cost(estimate, samples, job.world_size)
    if log:
        say(learn_from_log(estimate, samples, log), sys.stderr)
    if as_json:
        print_json(
            estimate.to_dict()
            | {
                "model": spec.model_name,
                "method": preset.method,
                "hardware": job.device.name,
                "devices": job.world_size,
            }
            | {"preset": sizes, "dtype": job.dtype, "duration": to_dict(estimate, took)}
            | {"levers": [asdict(saving) for saving in savings]}
        )
    else:
        devices = f"{job.world_size} × " if job.world_size > 1 else ""
        title = f"{spec.model}, {preset.method}, {_batch_in_words(job)} on {devices}{job.device.label}"
        EstimatedJob(
            title=title, settings=settings, estimate=estimate, savings=savings, took=took, amount=amount
        ).print(verbose)
    return 1 if estimate.fits is False else 0


def _say_task(spec: JobSpec) -> None:
    """Name the task of a checkpoint without a head, whose loss is its user's: of embeddings, say."""
    from hf_memopt.estimator.tracing.tasks import infer_task

    if spec.task is None and any(name.endswith("Model") for name in spec.config.architectures or ()):
        print(
            f"note: {spec.model_name} has no head of its own: estimated for {infer_task(spec.config)}; name another "
            "with --task, or ask dry-run about your script",
            file=sys.stderr,
        )


def _batch_in_words(job) -> str:
    """Samples and their tokens; of images and sound, which have none, the shape of a sample's inputs."""
    from hf_memopt.estimator.trainer_job import TrainerJob

    shapes = {name: shape for name, (shape, _) in job.batch.items()}
    if not shapes:  # prompts as text, to be completed
        return f"{job.fields['per_device_train_batch_size']} × {job.seq_len} tokens"
    first = next(iter(shapes.values()))
    if "input_ids" in shapes or isinstance(job, TrainerJob):  # of a pair of answers, each counts
        return f"{shapes.get('input_ids', first)[0]} × {job.seq_len} tokens"
    main, (samples, *sizes) = next(iter(shapes.items()))
    return f"{samples} × {main} of {' × '.join(map(str, sizes))}"


def _with_device_count(spec):
    """A JobSpec or DryRunOptions with the number of devices in the hardware's name (2x3090) as world size.

    Raises:
        InputError: another number than --world-size.
    """
    if spec.hardware is None:
        return spec
    if spec.hardware.lower() == "any":
        raise InputError(
            "hardware=any: an estimate is of one device; `hf-memopt plan MODEL --hardware any` compares all"
        )
    hardware, devices = with_device_count(spec.hardware, spec.world_size)
    return replace(spec, hardware=hardware, world_size=devices if devices > 1 else spec.world_size)


def settle_job(spec: JobSpec) -> JobSpec:
    """The job of a command line with its preset, its device and its model's configuration.

    Raises:
        InputError: an option or setting that cannot be used.
    """
    from hf_memopt.estimator.spec_job import read_model

    spec = _with_device_count(spec)
    preset = _choose_preset(spec)
    if spec.strategy and preset.engine.fsdp_version and (spec.world_size or preset.processes) == 1:
        shards = f"strategy={spec.strategy} shards a model over several processes"
        raise InputError(f"{shards}: add --world-size, or leave it out")
    if package := preset.engine.package:
        require(package, f"strategy={preset.strategy}")
    training = spec.training
    if not preset.name:  # on several devices, too, as many samples a device as TrainingArguments has
        plain = {"per_device_train_batch_size": preset.micro_batch_size, "gradient_accumulation_steps": 1}
        training = plain | training
    device = get_hardware(spec.hardware) if spec.hardware else preset.hardware
    return read_model(replace(spec, preset=preset, hardware=device, training=training))


def _choose_preset(spec: JobSpec) -> Preset:
    """The preset that is named, else that of the hardware that is named, else plain TrainingArguments here; of another
    tool's configuration these on any hardware."""
    if spec.tool:
        device = get_hardware(spec.hardware or "auto")
        return spec.tool.settings(plain_settings(device, spec.method, spec.strategy), spec)
    if name := spec.preset or spec.hardware:
        return preset_by_name(name, spec.method, spec.strategy, processes=spec.world_size)
    return plain_settings(get_hardware("auto"), spec.method, spec.strategy)


def _describe_settings(preset: Preset) -> tuple[str, str | None]:
    """The source of the settings, in words, and the preset whose sizes they are."""
    if not preset.name:
        return preset.meant_for, None
    if preset.name in list_presets():
        return f"preset {preset.name}", preset.name
    sizes = nearest_preset(preset.hardware)
    return f"settings of {preset.name} with the sizes of preset {sizes}", sizes


@dataclass(frozen=True, kw_only=True)
class DryRunOptions:
    """A script to run up to trainer.train(), its own arguments, its launcher with the launcher's, the devices to fit
    on, what one costs an hour, and whether tables are printed."""

    script: str
    arguments: list[str] = field(default_factory=list)
    launch: Launch | None = None
    launcher_words: list[str] = field(default_factory=list)
    hardware: str | Hardware = "auto"
    world_size: int | None = None
    price: float | None = None
    verbose: bool = False


def run_dry_run(options: DryRunOptions, plot_file: str | None, as_json: bool, allow_unconfined: bool) -> NoReturn:
    """Print the estimate of a script's job, and end the program: with 0 if the job fits or the capacity is unknown, 1
    if it does not fit, 2 if there is no estimate.

    Raises:
        InputError: an option that cannot be used, or a system that cannot confine the script.
    """
    if plot_file:
        require("matplotlib", "--plot")
        charts.check_path(Path(plot_file))
    if not Path(options.script).is_file():
        raise InputError(f"{options.script}: no such file")
    options = _with_device_count(options)
    if (reason := cannot_confine()) is None:
        code = _confined(options, plot_file, as_json)
    elif allow_unconfined:
        say(f"not confined, as {reason}: {options.script} can change files and send", sys.stderr)
        code = _dry_run(options, plot_file, as_json)
    else:
        raise InputError(
            f"{options.script} cannot be kept from changing files and sending, as {reason}: --allow-unconfined runs a "
            "script that you trust"
        )
    sys.stdout.flush()
    sys.stderr.flush()
    # What an unconfined script registered for its end would write for real; and torch can crash when Python tears down
    # fake weights, which live as long as the script's globals.
    os._exit(code)


def _confined(options: DryRunOptions, plot_file: str | None, as_json: bool) -> int:
    if options.hardware == "auto" and may_have_card():
        options = replace(options, hardware=_detected())
    plot = f"plot{Path(plot_file).suffix}" if plot_file else None  # beside the script's files

    def run(hub: Connection) -> int:
        os.environ.setdefault("MPLCONFIGDIR", tempfile.gettempdir())  # its usual place cannot be written
        return _dry_run(options, plot and os.path.join(tempfile.gettempdir(), plot), as_json, hub)

    def keep_plot(folder: str) -> None:
        drawn = os.path.join(folder, "tmp", plot or "")
        if plot_file and os.path.isfile(drawn) and not os.path.islink(drawn):
            write_whole(plot_file, read_bytes(drawn, _LARGEST_PLOT))

    code = run_confined(run, serve, keep_plot)
    if code > 128:
        raise InputError(f"{options.script}: signal {code - 128} ended it (9: most likely host memory ran out)")
    return code


def _detected() -> Hardware:
    """This machine's device, asked by a process that nothing is taken from: CUDA opens sockets."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def ask() -> None:
        device = get_hardware("auto")
        send.send(vars(device) | {"sources": dict(device.sources)})

    process = context.Process(target=ask, daemon=True)
    process.start()
    send.close()
    try:
        fields = receive.recv()
        return Hardware(**fields | {"sources": MappingProxyType(fields["sources"])})
    except EOFError:
        raise InputError("hardware=auto: this machine's device could not be asked; name one") from None
    finally:
        process.join()


def _dry_run(options: DryRunOptions, plot_file: str | None, as_json: bool, hub: Connection | None = None) -> int:
    """Run the script and print; the command's exit code."""
    try:
        return _print_dry_run(options, plot_file, as_json, hub)
    except (InputError, IncompatibleLibrary, ImpossibleEstimate) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
    except SystemExit:  # of the script's classes, whose methods a trace calls
        print(f"error: {options.script}: a traced step ends the program", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    return 2  # 1 is an answer: the job does not fit


def _print_dry_run(options: DryRunOptions, plot_file: str | None, as_json: bool, hub: Connection | None) -> int:
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.scripts.dry_run import caught_trainer
    from hf_memopt.estimator.scripts.launched import ScriptCommand
    from hf_memopt.estimator.suggestions import TRAINERS_ORDER, smallest_combination
    from hf_memopt.estimator.timing.duration import run_duration, training_steps
    from hf_memopt.estimator.trainer_job import describe_trainer

    savings = []
    command = ScriptCommand(
        options.script, options.arguments, options.launch, options.launcher_words, options.world_size
    )
    with caught_trainer(command, options.hardware, hub) as trainer:
        job = describe_trainer(trainer, options.hardware, None, None)
        estimate = estimate_job(job)
        if estimate.fits is False:
            savings = [*filter(None, [smallest_combination(job, estimate, order=TRAINERS_ORDER)])]
        devices = job.world_size
        steps = training_steps(trainer, devices)
    took = run_duration(steps, estimate.step_seconds, options.price, devices)
    if plot_file:
        _plot(estimate, plot_file, options.script)
    if as_json:
        print_json(
            estimate.to_dict()
            | {"hardware": job.device.name, "devices": devices, "duration": to_dict(estimate, took)}
            | {"levers": [asdict(saving) for saving in savings]}
        )
    else:
        EstimatedJob(
            title=f"{options.script} on {f'{devices} × ' if devices > 1 else ''}{job.device.label}",
            settings=None,
            estimate=estimate,
            savings=savings,
            took=took,
            amount=AmountOptions(price=options.price),
        ).print(options.verbose)
    return 1 if estimate.fits is False else 0


def import_libraries() -> None:
    """Import peft and transformers' Trainer without garbage collection, which takes half a second here and frees none.

    The modules stay frozen, and functions that they compile uncompiled: this is the command's own process, which
    trains nothing.
    """
    working("loading transformers")
    gc.disable()
    try:
        # bitsandbytes 0.50 decorates functions with torch.compile, which imports torch._inductor, a tenth of all this.
        with mock.patch("torch.compile", _uncompiled):
            import peft  # noqa: F401
            from transformers import Trainer  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


def _uncompiled(function=None, **kwargs):
    """torch.compile that leaves a function as it is."""
    return (lambda function: function) if function is None else function


def _plot(estimate, path: str, title: str) -> None:
    """Write a PNG, SVG, PDF or HTML file of the predicted timeline, atomically.

    Raises:
        InputError: another ending, or a folder that does not exist.
    """
    timeline = [(segment.split(":")[0], size) for segment, size in estimate.timeline]
    near = estimate.capacity_bytes and estimate.capacity_bytes < 3 * estimate.device_bytes
    capacity = estimate.capacity_bytes if near else None
    charts.save(
        path,
        f"Predicted memory of {title}",
        lambda axes, narrow: charts.by_phase(axes, narrow, timeline, estimate.peak_allocated_bytes, capacity),
    )
