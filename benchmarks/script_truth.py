"""Really train two steps of a script; used by estimator_scripts.py, in a process of its own.

Counted are the models that the Trainer holds when the script calls train(), and what the allocator gives out until two
steps are done. What comes before is left out: on a CPU, reading a checkpoint would be the peak of so small a model.
Tensors of a batch that lie in numpy's memory, as feature extractors return them, are copied into torch's: on an
accelerator they would be, too.
"""

import contextlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from profiled_peak import allocator_peak
from torch.utils._pytree import tree_map_only
from transformers import Trainer

from hf_memopt.estimator.tracing.trace import loaded_tensors

STEPS = 2


class Trained(BaseException):
    """Two steps are done. A BaseException, so that the script's own `except Exception` does not catch it."""


def model_bytes(trainer) -> int:
    """Bytes of every model that is an attribute of a trainer, such as a reference or a teacher."""
    models = [value for value in vars(trainer).values() if isinstance(value, torch.nn.Module)]
    storages = [tensor.untyped_storage() for model in models for tensor in loaded_tensors(model)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def in_torch_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of one whose memory torch's allocator did not give out."""
    return tensor if tensor.untyped_storage().resizable() else tensor.clone()


class InTorchMemory:
    """A collator whose batches' tensors torch's allocator gave out; its attributes are the collator's."""

    def __init__(self, collate: Callable) -> None:
        self.collate = collate

    def __call__(self, rows: list) -> dict:
        return tree_map_only(torch.Tensor, in_torch_memory, dict(self.collate(rows)))

    def __getattr__(self, name: str):
        return getattr(self.collate, name)


def allocated(trainer, train: Callable[[], None]) -> int:
    """Bytes of a trainer's models, and what the allocator gives out while it trains."""
    held = model_bytes(trainer)
    return held + allocator_peak(train)


def measure(script: str, arguments: list[str], peak: Callable = allocated) -> dict[str, int]:
    """Bytes that a script's first two steps take, and the steps that were done; the process is of no use after it.

    Args:
        peak: (trainer, train) -> bytes.
    """
    train, measured = Trainer.train, {}

    def two_steps(trainer, *args, **kwargs):
        trainer.args.max_steps, trainer.args.save_strategy = STEPS, "no"
        trainer.data_collator = InTorchMemory(trainer.data_collator)
        measured["measured_bytes"] = peak(trainer, lambda: train(trainer, *args, **kwargs))
        measured["steps"] = trainer.state.global_step
        raise Trained

    Trainer.train = two_steps
    sys.argv[:] = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    with contextlib.suppress(Trained):
        runpy.run_path(script, run_name="__main__")
    if measured.get("steps") != STEPS:
        raise RuntimeError(f"{script} took {measured.get('steps', 0)} steps")
    return measured
