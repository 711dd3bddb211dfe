"""Run a training script up to trainer.train(), without loading weights."""

import contextlib
import importlib.util
import os
import re
import runpy
import sys
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate.state import PartialState
from huggingface_hub import constants
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_memopt.compatibility import resolve
from hf_memopt.confined.hub import through_parent
from hf_memopt.errors import IncompatibleLibrary, InputError, one_line
from hf_memopt.estimator.device_stand_in import seen_by_script
from hf_memopt.estimator.fake_pretrained import fake_models
from hf_memopt.estimator.patches.trl_trainers import without_engine, without_precomputing
from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.scripts.launched import Launched, ScriptCommand, as_launched, read_launched
from hf_memopt.estimator.scripts.scratch_libraries import nothing_written
from hf_memopt.estimator.tracing.process_state import generators_kept
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.hardware.allocator import SPELLINGS
from hf_memopt.hardware.catalog import DEVICES_PER_HOST
from hf_memopt.presets import training_arguments as preset_arguments


class Ready(BaseException):
    """The script called train(). A BaseException, so that the script's own `except Exception` does not catch it."""

    def __init__(self, trainer):
        super().__init__()
        self.trainer = trainer


class OwnLoop(BaseException):
    """The script trains by itself.

    Attributes:
        call: what it called for that.
    """

    def __init__(self, call: str):
        super().__init__()
        self.call = call


@contextlib.contextmanager
def caught_trainer(
    command: ScriptCommand, hardware: str | Hardware = "auto", hub: Connection | None = None
) -> Iterator[Any]:
    """The Trainer that a script builds, caught when it calls train().

    Models are built on fake tensors (fake_pretrained), on the device that the estimate is for (device_stand_in), by
    rank 0 of the processes that its launcher would start (launched).
    Evaluation before training is skipped. What the script writes exists as long as the context (scratch_libraries).
    Only a confined process (hf_memopt.confined) keeps a script from changing and sending what it likes.

    Args:
        hub: what a confined process asks for the hub's files (confined.hub); None where it can reach the hub itself.

    Raises:
        InputError: there is no such script, it fails or ends, trains without a Trainer, or never calls train().
    """
    path = Path(command.script)
    if not path.is_file():
        raise InputError(f"{command.script}: no such file")
    _import_before()
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    # Downloads go to the hub's cache: here, or in the parent of a confined process.
    cache = (constants.HF_HUB_CACHE, constants.HF_XET_CACHE, os.path.join(constants.HF_HOME, "modules"))
    with nothing_written(*(() if hub else cache)), through_parent(hub) if hub else contextlib.nullcontext():
        with generators_kept(), seen_by_script(device, command.devices or 1):
            launched = read_launched(command)
        visible = min(launched.processes, DEVICES_PER_HOST)
        with as_launched(launched):
            with (
                generators_kept(),
                seen_by_script(device, visible),
                _script_environment(path, [*command.arguments]),
            ):
                trainer = _run(path)
                _check_processes(trainer, launched)
                chosen = {name: os.environ[name] for name in SPELLINGS if name in os.environ}
            for name in SPELLINGS:  # until the end of as_launched(), which restores the environment
                os.environ.pop(name, None)
            os.environ.update(chosen)
            # accelerate's state outlives the script, and the device that it names is not here.
            PartialState._shared_state["device"] = trainer.args.__dict__["_setup_devices"] = torch.device("cpu")
            trainer.model_init = None  # it was called for this model; called again it would read weights
            yield trainer


def _presets_as_launched() -> contextlib.AbstractContextManager:
    """Refuse a preset whose devices or engine nothing starts: the script would train another job, with a line in the
    log, and nobody asked about that."""
    build = preset_arguments.build_training_arguments

    def build_as_launched(preset, *args, **kwargs):
        if preset.processes > 1 and resolve.world_size() == 1:
            raise InputError(
                f"the script's preset {preset.name} is for {preset.processes} devices, and this dry run has one: add "
                f"--hardware {preset.name}, or the launcher's command"
            )
        launched = resolve.launched_strategy()
        if preset.processes > 1 and not preset.mesh and launched != preset.strategy and preset.strategy != "ddp":
            raise InputError(
                f"the script's preset {preset.name} has strategy={preset.strategy}, which `accelerate launch` starts, "
                f"and here {launched or 'nothing'} is launched: add --config_file with the accelerate.yaml that "
                f"`hf-memopt export {preset.name} DIR --strategy {preset.strategy}` writes"
            )
        return build(preset, *args, **kwargs)

    return mock.patch.object(preset_arguments, "build_training_arguments", build_as_launched)


def _check_processes(trainer, launched: Launched) -> None:
    """Refuse a script whose processes would not train together, each of them the whole job.

    Raises:
        InputError: so it is, as of TrainingArguments (transformers 5.24) on CPUs without use_cpu.
    """
    if launched.processes > 1 and trainer.args.world_size == 1:
        raise InputError(
            f"the launcher starts {launched.processes} processes, and the script's TrainingArguments know of one, so "
            "that each would train alone: on a CPU they need --use_cpu"
        )


def _import_before() -> None:
    """Import what asks for the device while it is imported, and takes the answer for good."""
    import bitsandbytes  # noqa: F401
    import peft  # noqa: F401
    import transformers.trainer  # noqa: F401


def _run(path: Path):
    """Run a script until it calls train(); its Trainer."""
    script = str(path)
    # Importing trl takes a second: for scripts that name it.
    trl = importlib.util.find_spec("trl") and re.search(rb"\btrl\b", path.read_bytes())
    with (
        fake_models(),
        _caught_at_train(),
        _own_loops(),
        _presets_as_launched(),
        without_precomputing() if trl else contextlib.nullcontext(),
        without_engine() if trl else contextlib.nullcontext(),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except Ready as ready:
            return ready.trainer
        except (InputError, IncompatibleLibrary):
            raise
        except OwnLoop as loop:
            raise InputError(
                f"{script}: train() of a Trainer was never reached: {_place(loop, path)} calls {loop.call}, and a "
                "training loop of one's own is not modelled; estimate its model with `hf-memopt estimate`"
            ) from loop
        except SystemExit as end:
            if end.code not in (None, 0):
                how = f"exit code {end.code}" if isinstance(end.code, int) else f"“{one_line(end)}”"
                raise InputError(f"{script} ended with {how} before trainer.train()") from end
        except Exception as error:
            raise InputError(_explain(error, path)) from error
    raise InputError(f"{script} ended without calling train() of a transformers Trainer")


def _explain(error: Exception, script: Path) -> str:
    """The script's own error in one line: where in the script, what, and where it was raised."""
    message = f"{type(error).__name__}: {one_line(error)[:600]}"
    if isinstance(error, SyntaxError) and error.filename == str(script):
        return f"{script.name}, line {error.lineno}: {message}"
    place, frames = _place(error, script), traceback.extract_tb(error.__traceback__)
    raised = "" if not frames or Path(frames[-1].filename) == script else f" (raised in {_short(frames[-1])})"
    if type(error).__module__.startswith("torch._subclasses.fake_tensor"):
        message = f"the value of a tensor is asked for, and a dry run has none: {message}"
    elif re.search(r"Permission denied|Operation not permitted", message):
        message += "; a dry run denies what changes files past Python's own functions, and connections"
    return f"{place}: {message}{raised}"


def _place(error: BaseException, script: Path) -> str:
    """`file, line N`: the last frame of an error in the script, or in a file beside it."""
    folder = script.resolve().parent

    def is_own(file: Path) -> bool:
        is_beside = folder in file.resolve().parents and "site-packages" not in file.parts
        return file == script or (is_beside and file.is_file())

    own = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(Path(frame.filename))]
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}" if own else script.name


def _short(frame: traceback.FrameSummary) -> str:
    """A frame's file from its package on, and its line."""
    parts = Path(frame.filename).parts
    start = parts.index("site-packages") + 1 if "site-packages" in parts else -1
    return f"{'/'.join(parts[start:])}:{frame.lineno}"


@contextlib.contextmanager
def _script_environment(path: Path, arguments: list[str]) -> Iterator[None]:
    """sys.argv and sys.path as `python script.py` sets them. What the script prints goes to stderr: stdout is for the
    command's result."""
    leave, process = os._exit, os.getpid()

    def end(code):
        if os.getpid() != process:
            leave(code)
        raise SystemExit(code)

    with (
        mock.patch.object(os, "_exit", end),  # the answer would be its exit code; its child processes may
        mock.patch.object(os, "environ", os.environ),  # datasets replaces it by a copy (Dataset.map with num_proc)
        mock.patch.object(sys, "argv", [str(path), *arguments]),
        mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]),
        contextlib.redirect_stdout(sys.stderr),
    ):
        yield


_TRAINER = Part.DRY_RUN.replaces(
    "transformers:Trainer.train(self)",
    "transformers:Trainer.evaluate(self)",
    "transformers:Trainer.init_hf_repo(self)",
    why="the script stops where it would train",
)


def _caught_at_train() -> contextlib.AbstractContextManager:
    def train(self, *args, **kwargs):
        raise Ready(self)

    def evaluate(self, *args, metric_key_prefix="eval", **kwargs):
        return {f"{metric_key_prefix}_loss": 0.0}

    return _TRAINER.replaced(train=train, evaluate=evaluate, init_hf_repo=lambda self, *args, **kwargs: None)


@contextlib.contextmanager
def _own_loops() -> Iterator[None]:
    """Stop a script that trains without a Trainer at the first call that only training makes."""
    from accelerate import Accelerator

    prepare = Accelerator.prepare

    def prepare_data(self, *args, **kwargs):  # a Trainer's loaders are prepared by it, too
        if any(isinstance(arg, (torch.nn.Module, torch.optim.Optimizer)) for arg in args):
            raise OwnLoop("Accelerator.prepare()")
        return prepare(self, *args, **kwargs)

    def stop(call: str):
        def stopped(*args, **kwargs):
            raise OwnLoop(call)

        return stopped

    with (
        mock.patch.object(Accelerator, "prepare", prepare_data),
        mock.patch.object(Accelerator, "backward", stop("Accelerator.backward()")),
        mock.patch.object(torch.Tensor, "backward", stop("backward()")),
        mock.patch.object(torch.autograd, "backward", stop("torch.autograd.backward()")),
        register_optimizer_step_pre_hook(stop("step() of an optimizer")),
    ):
        yield
