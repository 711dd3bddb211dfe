"""SnapshotCallback writes every allocation of chosen steps, and those before memory ran out, to a file.

On CUDA the caching allocator records its own history (torch.cuda.memory._record_memory_history: private by name, but
the documented way to record one; if it changes, test_snapshot.py fails). Elsewhere the profiler's allocator events are
written in the same format. `hf-memopt snapshot FILE` reads both.
"""

import gzip
import json
import logging
import pickle
import time
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch._C._profiler import _EventType
from transformers import TrainerCallback

from hf_memopt.files import write_whole
from hf_memopt.levers.arguments import step_ranges
from hf_memopt.monitor.readers import Reader

logger = logging.getLogger(__name__)
_MOST_OOM_FILES = 3  # of a run


class SnapshotCallback(TrainerCallback):
    """Records memory for any Trainer: `callbacks=[SnapshotCallback(steps="2-3")]`.

    Files are written into output_dir: memory_snapshot_step_2.pickle (.json.gz without CUDA) after the last of
    consecutive steps, by the first process; memory_snapshot_oom_1.pickle when CUDA's allocator raises, by the process
    that it happens in. Recording slows down the recorded steps.

    Args:
        steps: optimizer steps to record, counted from 1: "2", "2-4", "2,100-101"; empty for none.
        on_oom: on CUDA, record all the time, and write the last allocations the first three times that memory runs
            out. Elsewhere only a step that is being recorded is written.
        max_entries: length of CUDA's history, in allocations and frees.

    Raises:
        InputError: `steps` has another format.
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

    # ---- events of the Trainer

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
            self._marks.clear()  # with on_oom the history is a ring: marks of older steps have no allocations left
            self._owners.clear()
            self._own("parameters", self._model.named_parameters())
            self._own("other", self._model.named_buffers())
            self._own("optimizer_states", _state_tensors(optimizer))
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
            self._own("optimizer_states", _state_tensors(optimizer))

    def on_step_end(self, args, state, control, **kwargs):
        self._mark("phase", "between")
        if any(last == state.global_step for _, last in self.ranges) and self._recorder is not None:
            self._mark("step", "end")
            self._write(f"step_{state.global_step}", f"step {state.global_step}")
            if not (self.on_oom and args.device.type == "cuda"):
                self.stop()

    def on_train_end(self, args, state, control, **kwargs):
        self.stop()

    def stop(self) -> None:
        """Stop recording: where training ends, or has ended without on_train_end, as after an error."""
        if self._recorder is not None:
            self._recorder.end()
            self._recorder = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def out_of_memory(self) -> None:
        """Write the recording after memory ran out. On CUDA the allocator's observer has done so already."""
        if isinstance(self._recorder, _ProfilerRecorder):
            self._ran_out()
            self.stop()

    # ---- recording

    def _begin(self) -> None:
        """Start to record, and drop older records."""
        if self._recorder is None:
            device = self._trainer_args.device
            cuda = device.type == "cuda"
            self._recorder = _CudaRecorder(device, self.max_entries) if cuda else _ProfilerRecorder(self._model)
            self._hook(self._model)
        self._recorder.begin()

    def _mark(self, kind: str, text: str) -> None:
        if self._recorder is not None:
            self._marks.append((time.time_ns() // 1000, kind, text))

    def _hook(self, model) -> None:
        """Mark the phases by forward hooks, and on CUDA label allocations with the module that makes them."""
        # Modules that each thread is in: checkpointed layers run forward again in the autograd thread.
        inside: dict[int, list[str]] = {}

        def enter(name, module, inputs):
            if not name:
                self._mark("phase", "forward")
            if self._recorder is not None:
                inside.setdefault(get_ident(), []).append(name)
                self._recorder.label(name)

        def leave(name, module, inputs, output):
            names = inside.get(get_ident())
            if self._recorder is not None and names:
                names.pop()
                self._recorder.label(names[-1] if names else "")
            if not name:
                self._mark("phase", "backward")

        # The profiler knows modules by itself.
        modules = model.named_modules() if isinstance(self._recorder, _CudaRecorder) else [("", model)]
        for name, module in modules:
            self._hooks.append(module.register_forward_pre_hook(partial(enter, name)))
            self._hooks.append(module.register_forward_hook(partial(leave, name), always_call=True))

    def _own(self, kind: str, tensors) -> None:
        """Record which addresses hold weights, gradients and states, and when: addresses are reused."""
        now = time.time_ns() // 1000
        for name, tensor in tensors:
            local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's shard
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
        metadata = {
            "version": 1,
            "reason": reason,
            "device": str(args.device),
            "capacity": Reader(args.device).capacity(),
            "marks": self._marks,
            "owners": self._owners,
        }
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        try:
            path = self._recorder.write(Path(args.output_dir) / f"memory_snapshot_{name}{rank}", metadata)
        except Exception as error:  # the run matters more than its snapshot
            logger.warning("could not write the memory snapshot %s: %s", name, error)
            return
        self.files.append(path)
        logger.warning("memory of %s was recorded: hf-memopt snapshot %s", reason, path)


# The recorders to call when CUDA's allocator raises.
_watching: "weakref.WeakSet[_CudaRecorder]" = weakref.WeakSet()
_observed = False


def _observe() -> None:
    """Attach this process's one observer of CUDA's allocator.

    torch 2.13 can attach observers but not detach them (attachOutOfMemoryObserver in torch/csrc/cuda has no
    counterpart): one per run would call callbacks of finished runs and keep their models alive. Where the private
    function is missing, nothing is written when memory runs out.
    """
    global _observed
    if not _observed and hasattr(torch._C, "_cuda_attach_out_of_memory_observer"):
        torch._C._cuda_attach_out_of_memory_observer(_ran_out)
        _observed = True


def _ran_out(*details) -> None:
    for recorder in list(_watching):
        recorder.ran_out(*details)


class _CudaRecorder:
    """The caching allocator's own history."""

    def __init__(self, device, max_entries: int) -> None:
        self.device, self.max_entries = device, max_entries
        self.ran_out: Callable[..., object] | None = None

    def begin(self) -> None:
        torch.cuda.memory._record_memory_history(
            context="alloc", stacks="python", max_entries=self.max_entries, device=self.device, clear_history=True
        )

    def end(self) -> None:
        torch.cuda.memory._record_memory_history(None, device=self.device)
        _watching.discard(self)

    def watch(self, ran_out: Callable[..., object]) -> None:
        """Call `ran_out` when the allocator raises, before anything is freed, until end()."""
        self.ran_out = ran_out
        _watching.add(self)
        _observe()

    def label(self, text: str) -> None:
        """Label the allocations that this thread makes from now on."""
        torch.cuda.memory._set_memory_metadata(text)  # private (torch 2.13)

    def write(self, path: Path, metadata: dict[str, Any]) -> Path:
        snapshot = torch.cuda.memory._snapshot(self.device) | {"hf_memopt": metadata}
        path = path.with_name(path.name + ".pickle")
        write_whole(path, pickle.dumps(snapshot))
        return path


class _ProfilerRecorder:
    """torch's profiler, whose allocator events hold the same."""

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

    def label(self, text: str) -> None:
        """Nothing: the profiler records modules itself."""

    def write(self, path: Path, metadata: dict[str, Any]) -> Path:
        profiler = self._profiler
        self.end()
        modules = {id(module): name for name, module in self.model.named_modules()}
        trace, stacks = profiled_trace(profiler.profiler.kineto_results, modules)
        snapshot = {"segments": [], "device_traces": [trace], "stacks": stacks, "hf_memopt": metadata}
        path = path.with_name(path.name + ".json.gz")
        write_whole(path, gzip.compress(json.dumps(snapshot).encode(), compresslevel=3))
        return path


def _state_tensors(optimizer):
    """Names and tensors of an optimizer's states."""
    while hasattr(optimizer, "optimizer") and not isinstance(getattr(optimizer, "state", None), dict):
        optimizer = optimizer.optimizer
    for index, state in enumerate(getattr(optimizer, "state", {}).values()):
        if isinstance(state, dict):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    yield f"{name} of weight {index}", value


def profiled_trace(results, modules: dict[int, str]) -> tuple[list[dict[str, Any]], list[list[dict[str, Any]]]]:
    """Allocations and frees in order, and the stacks that they refer to by index.

    Reads the private event tree of torch 2.13's profiler, the only form of its results in which an allocation has its
    stack and module. If it changes, snapshots without CUDA cannot be written (test_snapshot.py fails).

    Args:
        results: `kineto_results` of a profiler with profile_memory and with_stack.
        modules: id of a module -> its name.

    Returns:
        Dicts of `action` (alloc, free_completed), `addr`, `size` (bytes), `time_us` (since 1970), `stack` (an index
        into the second list) and `user_metadata` (the module's name); and lists of frames, innermost first, each a
        dict of `filename`, `line`, `name`.
    """
    trace: list[dict[str, Any]] = []
    stacks: dict[tuple, int] = {(): 0}
    pending = [(root, (), "") for root in results.experimental_event_tree()]
    while pending:
        event, stack, module = pending.pop()
        if event.tag == _EventType.Allocation:
            size = event.extra_fields.alloc_size
            trace.append(
                {
                    "action": "alloc" if size >= 0 else "free_completed",
                    "addr": event.extra_fields.ptr,
                    "size": abs(size),
                    "time_us": event.start_time_ns / 1000,
                    "stack": stacks.setdefault(stack, len(stacks)),
                    "user_metadata": module,
                }
            )
            continue
        if event.tag == _EventType.PyCall:
            called = event.extra_fields.callsite
            stack = ((called.file_name, called.line_number, called.function_name), *stack)
            if event.extra_fields.module is not None:
                module = modules.get(int(event.extra_fields.module.self_ptr), module)
        elif event.tag == _EventType.TorchOp:
            stack = (("", 0, event.name), *stack)
        pending.extend((child, stack, module) for child in event.children)
    trace.sort(key=lambda event: event["time_us"])
    named = [[{"filename": file, "line": line, "name": name} for file, line, name in stack] for stack in stacks]
    return trace, named
