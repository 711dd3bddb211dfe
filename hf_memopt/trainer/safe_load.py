"""Checkpoints are resumed from without running what is in them.

transformers and accelerate load with weights_only=True. Two libraries beneath them do not: DeepSpeed 0.19.8
(TorchCheckpointEngine.load: weights_only=False) and torch 2.13's distributed checkpoints
(FileSystemReader.read_metadata unpickles, DefaultLoadPlanner.load_bytes: weights_only=False). Whoever resumes from a
folder that somebody else wrote would run their code. What is patched here can go when these libraries load safely
themselves.
"""

import importlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

from hf_memopt.errors import InputError

# Classes that DeepSpeed 0.19.8 pickles into its checkpoints beside tensors and containers.
_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# What the metadata of torch's distributed checkpoints consist of, beside the dtypes and layouts of torch.
_METADATA = "torch.distributed.checkpoint.metadata"
_METADATA_NAMES = {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # as Python 3.13 names it
}


@contextmanager
def without_code(checkpoint: str) -> Iterator[None]:
    """While it lasts, torch.load, DeepSpeed and torch's distributed checkpoints read tensors and plain values alone.

    Args:
        checkpoint: the folder's name, for the error.

    Raises:
        InputError: a file asks for something else, which could run code.
    """
    import torch
    from torch.distributed.checkpoint import filesystem

    load, refused = torch.load, []

    def load_weights_only(*args, **kwargs):
        try:
            return load(*args, **{**kwargs, "weights_only": True})
        except pickle.UnpicklingError as error:
            refused.append(_reason(error))
            raise

    reader = SimpleNamespace(**{**vars(pickle), "load": lambda file: _MetadataUnpickler(file, refused).load()})
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "load", load_weights_only))
        patches.enter_context(mock.patch.object(filesystem, "pickle", reader))
        patches.enter_context(torch.serialization.safe_globals(_classes_of_deepspeed()))
        try:
            yield
        except BaseException as error:  # torch's CheckpointException is one, and hides what it was raised from
            if not refused:
                raise
            raise InputError(
                f"resume_from_checkpoint: {checkpoint} is not read, since it could run code: {refused[0]}"
            ) from error


def _classes_of_deepspeed() -> list[type]:
    if "deepspeed" not in sys.modules:
        return []
    named = (name.rpartition(".") for name in _DEEPSPEED)
    return [getattr(importlib.import_module(module), name) for module, _, name in named]


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file, refused: list[str]) -> None:
        super().__init__(file)
        self._refused = refused

    def find_class(self, module: str, name: str):
        import torch

        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype | torch.layout):
            return found
        if module == _METADATA:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # not what the module has imported
                return found
        self._refused.append(f"its metadata ask for {module}.{name}")
        raise pickle.UnpicklingError(self._refused[-1])


def _reason(error: Exception) -> str:
    """What torch refused, without its advice to switch the check off."""
    text = " ".join(str(error).split())
    start = text.find("GLOBAL ")
    return text[start:].split(" was not ")[0][:200] if start >= 0 else text[:200]
