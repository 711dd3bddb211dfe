"""SnapshotCallback: every allocation of chosen steps, and of the moments before memory ran out, into a file.

On CUDA the caching allocator keeps its own history (torch.cuda.memory._record_memory_history); elsewhere the
profiler's allocator events are written in the same words. `hf-memopt snapshot FILE` reads both.
"""

import gzip
import json
import logging
import pickle
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from threading import get_ident
from typing import Any

from transformers import TrainerCallback

from hf_memopt.files import write_whole
from hf_memopt.levers.arguments import step_ranges
from hf_memopt.monitor.profiled_allocations import profiled_trace
from hf_memopt.monitor.readers import Reader

logger = logging.getLogger(__name__)
_MOST_OOM_FILES = 3


class SnapshotCallback(TrainerCallback):
    """Records memory for any Trainer: `callbacks=[SnapshotCallback(steps="2-3")]`.

    Files are written into output_dir: memory_snapshot_step_2.pickle (.json.gz where there is no CUDA) after the last
    of neighbouring steps, by the first process; memory_snapshot_oom_1.pickle when CUDA's allocator gives up, by
    whichever process that is. Recording slows the recorded steps down.

    Args:
        steps: optimizer steps to record, counted from 1: "2", "2-4", "2,100-101"; empty for none.
        on_oom: on CUDA, keep the last allocations all the time, and write them the first three times that memory runs
            out. Elsewhere only a step that is being recorded can be written.
        max_entries: allocations and frees that CUDA's history keeps.

    Raises:
        InputError: steps that cannot be read.
    """

    def __init__(self, steps: str = "2", on_oom: bool = True, max_entries: int = 200_000) -> None:
        self.ranges = step_ranges(steps)
        self.on_oom = on_oom
        self.max_entries = max_entries
        self.files: list[Path] = []
        self._recorder: _CudaRecorder | _ProfilerRecorder | None = None
        self._marks: list[tuple[int, str, str]] = []
        self._owners: list[tuple[int, int, int, str, str]] = []
        self._hooks: list = []
        self._failed = 0
        self._trainer_args = None
        self._step = 0

    # ---- the Trainer's moments

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._trainer_args, self._model, self._step = args, model, state.global_step
        if args.device.type == "cuda" and self.on_oom:
            self._begin()
            self._recorder.watch(self._ran_out)

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        self._step = state.global_step + 1
        if any(first == self._step for first, _ in self.ranges) and state.is_world_process_zero:
            self._begin()
        if self._recorder is not None and not any(first < self._step <= last for first, last in self.ranges):
            self._marks.clear()  # of a history without end, what was said of older steps is of no use
            self._owners.clear()
            self._own("parameters", self._model.named_parameters())
            self._own("other", self._model.named_buffers())
            self._own("optimizer_states", _states(optimizer))
        self._mark("step", str(self._step))
        self._mark("phase", "forward")

    def on_substep_end(self, args, state, control, **kwargs):
        self._mark("phase", "forward")

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self._recorder is not None:
            self._own("gradients", ((name, weight.grad) for name, weight in model.named_parameters()))
        self._mark("phase", "optimizer")

    def on_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        if self._recorder is not None:
            self._own("optimizer_states", _states(optimizer))

    def on_step_end(self, args, state, control, **kwargs):
        self._mark("phase", "between")
        if any(last == state.global_step for _, last in self.ranges) and self._recorder is not None:
            self._mark("step", "end")
            self._write(f"step_{state.global_step}", f"step {state.global_step}")
            if not (self.on_oom and args.device.type == "cuda"):
                self._end()

    def on_train_end(self, args, state, control, **kwargs):
        self._end()

    def stop(self) -> None:
        """Record nothing more, where training ended without on_train_end."""
        self._end()

    def out_of_memory(self) -> None:
        """Write what has been recorded, where memory just ran out; CUDA's allocator has said so itself before."""
        if isinstance(self._recorder, _ProfilerRecorder):
            self._ran_out()
            self._end()

    # ---- what it does then

    def _begin(self) -> None:
        """Record from here on, and forget what was before."""
        if self._recorder is None:
            device = self._trainer_args.device
            cuda = device.type == "cuda"
            self._recorder = _CudaRecorder(device, self.max_entries) if cuda else _ProfilerRecorder(self._model)
            self._hook(self._model)
        self._recorder.begin()

    def _end(self) -> None:
        if self._recorder is not None:
            self._recorder.end()
            self._recorder = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _mark(self, kind: str, text: str) -> None:
        if self._recorder is not None:
            self._marks.append((time.time_ns() // 1000, kind, text))

    def _hook(self, model) -> None:
        """Know where forward becomes backward, and on CUDA in which module an allocation is made."""
        inside: dict[int, list[str]] = {}  # thread -> names; recomputation has its own

        def enter(name):
            def before(module, inputs):
                if not name:
                    self._mark("phase", "forward")
                if self._recorder is not None:
                    inside.setdefault(get_ident(), []).append(name)
                    self._recorder.say(name)

            return before

        def leave(name):
            def after(module, inputs, output):
                names = inside.get(get_ident())
                if self._recorder is not None and names:
                    names.pop()
                    self._recorder.say(names[-1] if names else "")
                if not name:
                    self._mark("phase", "backward")

            return after

        everywhere = model.named_modules() if isinstance(self._recorder, _CudaRecorder) else [("", model)]
        for name, module in everywhere:
            self._hooks.append(module.register_forward_pre_hook(enter(name)))
            self._hooks.append(module.register_forward_hook(leave(name), always_call=True))

    def _own(self, kind: str, tensors) -> None:
        """Remember which storages are weights, gradients and states; addresses are used again, so the time counts."""
        now = time.time_ns() // 1000
        for name, tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)
            if local is None or not local.numel() or local.device.type == "meta":
                continue
            address, size = local.data_ptr(), local.numel() * local.element_size()
            self._owners.append((now, address, size, kind, name))

    def _ran_out(self, *_) -> None:
        if self._recorder is not None and self._failed < _MOST_OOM_FILES:
            self._failed += 1
            self._write(f"oom_{self._failed}", f"out of memory in step {self._step}")

    def _write(self, name: str, reason: str) -> None:
        args = self._trainer_args
        rank = f"_rank_{args.process_index}" if args.process_index else ""
        about = {
            "version": 1,
            "reason": reason,
            "device": str(args.device),
            "capacity": Reader(args.device).capacity(),
            "marks": self._marks,
            "owners": self._owners,
        }
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        try:
            path = self._recorder.write(Path(args.output_dir) / f"memory_snapshot_{name}{rank}", about)
        except Exception as error:  # a picture of the run is not worth the run
            logger.warning("the memory snapshot %s could not be written: %s", name, error)
            return
        self.files.append(path)
        logger.warning("memory of %s was recorded: hf-memopt snapshot %s", reason, path)


# The recorders that want to know when CUDA's allocator gives up.
_watching: "weakref.WeakSet[_CudaRecorder]" = weakref.WeakSet()
_observed = False


def _observe() -> None:
    """Attach the process's one observer of CUDA's allocator.

    torch 2.13 can attach observers and not detach them (torch/csrc/cuda/memory_snapshot, no counterpart of
    attachOutOfMemoryObserver): one for each run would call callbacks of runs that are over, and keep their models.
    """
    import torch

    global _observed
    if not _observed and hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
        torch._C._cuda_attach_out_of_memory_observer(_ran_out)
        _observed = True


def _ran_out(*where) -> None:
    for recorder in list(_watching):
        recorder.ran_out(*where)


class _CudaRecorder:
    """The caching allocator's own history."""

    def __init__(self, device, max_entries: int) -> None:
        self.device, self.max_entries = device, max_entries
        self.ran_out: Callable[..., object] | None = None

    def begin(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=self.max_entries, device=self.device, clear_history=True
        )

    def end(self) -> None:
        import torch

        torch.cuda.memory._record_memory_history(None, device=self.device)
        _watching.discard(self)

    def watch(self, ran_out: Callable[..., object]) -> None:
        """Call a function the moment that the allocator gives up, before anything is freed; until the end."""
        self.ran_out = ran_out
        _watching.add(self)
        _observe()

    def say(self, text: str) -> None:
        """Allocations of this thread carry the text from now on."""
        import torch

        if hasattr(torch.cuda.memory, "_set_memory_metadata"):
            torch.cuda.memory._set_memory_metadata(text)

    def write(self, path: Path, about: dict[str, Any]) -> Path:
        import torch

        found = torch.cuda.memory._snapshot(self.device) | {"hf_memopt": about}
        path = path.with_name(path.name + ".pickle")
        write_whole(path, pickle.dumps(found))
        return path


class _ProfilerRecorder:
    """torch's profiler, whose allocator events tell the same."""

    def __init__(self, model) -> None:
        self.model, self._profiler = model, None

    def begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        self._profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
        self._profiler.__enter__()

    def end(self) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._profiler = None

    def say(self, text: str) -> None:
        """The profiler knows modules by itself."""

    def write(self, path: Path, about: dict[str, Any]) -> Path:
        profiler = self._profiler
        self.end()
        modules = {id(module): name for name, module in self.model.named_modules()}
        trace, stacks = profiled_trace(profiler.profiler.kineto_results, modules)
        found = {"segments": [], "device_traces": [trace], "stacks": stacks, "hf_memopt": about}
        path = path.with_name(path.name + ".json.gz")
        write_whole(path, gzip.compress(json.dumps(found).encode(), compresslevel=3))
        return path


def _states(optimizer):
    """The tensors of an optimizer's states."""
    import torch

    while hasattr(optimizer, "optimizer") and not isinstance(getattr(optimizer, "state", None), dict):
        optimizer = optimizer.optimizer
    for index, state in enumerate(getattr(optimizer, "state", {}).values()):
        if isinstance(state, dict):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of weight {index}", value
