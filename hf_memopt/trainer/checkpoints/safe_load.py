"""Loads checkpoints without running code in them.

transformers and accelerate load with weights_only=True. Two libraries below them do not: DeepSpeed 0.19.8
(TorchCheckpointEngine.load: weights_only=False) and torch 2.13's distributed checkpoints
(FileSystemReader.read_metadata unpickles, DefaultLoadPlanner.load_bytes: weights_only=False). Resuming from
a folder of unknown origin would run its code. The patches here can go when both load with weights_only=True.
"""

import importlib
import pickle
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum, EnumType
from types import SimpleNamespace
from unittest import mock

import torch

from hf_memopt.errors import InputError

# Classes in DeepSpeed 0.19.8's checkpoints, apart from tensors and containers. One that is missing here makes its
# checkpoints refused, not unsafe.
_DEEPSPEED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
# Names in the metadata of torch 2.13's distributed checkpoints, apart from its own module's classes, dtypes and
# layouts.
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
    """A context in which torch.load, DeepSpeed and torch's distributed checkpoints read only tensors and plain values.

    Args:
        checkpoint: the folder, for the error message.

    Raises:
        InputError: a file refers to anything else, which could run code.
    """
    from torch.distributed.checkpoint import filesystem  # which some builds of torch lack

    load, refused = torch.load, []

    def noting_refusals(read, *args, **kwargs):
        try:
            return read(*args, **kwargs)
        except pickle.UnpicklingError as error:
            refused.append(_reason(error))
            raise

    def load_weights_only(*args, **kwargs):
        return noting_refusals(load, *args, **{**kwargs, "weights_only": True})

    # FileSystemReader.read_metadata calls `pickle.load` by its module-level name.
    reader = SimpleNamespace(**{**vars(pickle), "load": lambda file: noting_refusals(_MetadataUnpickler(file).load)})
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch, "load", load_weights_only))
        patches.enter_context(mock.patch.object(filesystem, "pickle", reader))
        patches.enter_context(
            torch.serialization.safe_globals([*_deepspeed_classes(), (_enum_member, "builtins.getattr")])
        )
        try:
            yield
        except BaseException as error:  # torch's CheckpointException derives from it, and hides its cause
            if not refused:
                raise
            raise InputError(
                f"resume_from_checkpoint: {checkpoint} is not loaded, since it could run code: {refused[0]}"
            ) from error


def _deepspeed_classes() -> list[type]:
    if "deepspeed" not in sys.modules:
        return []
    named = (name.rpartition(".") for name in _DEEPSPEED)
    return [getattr(importlib.import_module(module), name) for module, _, name in named]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if (module, name) in _METADATA_NAMES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype | torch.layout):
            return value
        if module == _METADATA:
            cls = super().find_class(module, name)
            if isinstance(cls, type) and cls.__module__ == module:  # not a name that the module imports
                return cls
        raise pickle.UnpicklingError(f"its metadata refer to {module}.{name}")


def _enum_member(cls: type, name: str) -> Enum:
    """The enum member that Python 3.11.0 to 3.11.3 pickle as getattr(class, name); any other class is refused."""
    if not isinstance(cls, EnumType):
        raise pickle.UnpicklingError(f"GLOBAL builtins.getattr of {cls!r} was not an enumeration's member")
    return cls[name]


def _reason(error: Exception) -> str:
    """The part that torch refused, without its advice to turn the check off."""
    text = " ".join(str(error).split())
    start = text.find("GLOBAL ")
    return text[start:].split(" was not ")[0][:200] if start >= 0 else text[:200]
