"""Lay out a merged checkpoint: its tensors, each from which tensor of the base, and in which file."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from hf_memopt.contrib.merging.adapter import Adapted, Change
from hf_memopt.contrib.merging.base import Base
from hf_memopt.contrib.merging.skeleton import Skeleton
from hf_memopt.contrib.merging.tensor_file import count_bytes
from hf_memopt.errors import InputError


@dataclass(frozen=True)
class Output:
    """A tensor of the merged checkpoint.

    Attributes:
        name: in the checkpoint.
        parameter: the model's parameter that it becomes; None where it becomes a part of one, or several.
        source: the base's tensor.
        change: from the base's weight to the merged one; None where the adapter does not touch it.
    """

    name: str
    parameter: str | None
    source: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    change: Change | None


@dataclass(frozen=True)
class Layout:
    """All tensors, in the base's order.

    Attributes:
        untied: training changed embedding and head differently, so that they are no longer one weight.
    """

    outputs: list[Output]
    untied: bool


def lay_out(base: Base, skeleton: Skeleton, adapted: Adapted, dtype: torch.dtype | None) -> Layout:
    """Lay out the merged checkpoint.

    Args:
        dtype: of floating-point weights; None keeps the base's.

    Raises:
        InputError: the adapter changes a weight that the base does not store as a tensor of its own.
    """
    untied = _is_untied(adapted, skeleton.tied)
    parameters = {name: skeleton.find_parameter(name) for name in base.tensors}
    outputs = []
    for name, parameter in parameters.items():
        if not untied and skeleton.tied.get(parameter, "") in parameters.values():
            continue  # a second copy of the embedding, which would stay what it was before training
        outputs.append(_make_output(base, skeleton, adapted, dtype, name, parameter))
        for tied, shared in skeleton.tied.items():
            if untied and shared == parameter and tied not in parameters.values():
                outputs.append(replace(_make_output(base, skeleton, adapted, dtype, name, tied), name=tied))
    changed = {output.parameter for output in outputs if output.change is not None}
    for name in sorted(adapted.changes.keys() - changed):
        if name not in skeleton.tied or untied:
            raise InputError(
                f"{name} is no tensor of its own in {base.folder}, or of another model: use peft's merge_and_unload()"
            )
    return Layout(outputs, untied)


def split_into_files(outputs: list[Output], max_size: int) -> list[list[Output]]:
    """Consecutive tensors of at most so many bytes, or a single larger one."""
    files: list[list[Output]] = []
    size = 0
    for output in outputs:
        bytes_ = count_bytes(output.shape, output.dtype)
        if not files or size + bytes_ > max_size:
            files.append([])
            size = 0
        files[-1].append(output)
        size += bytes_
    return files


def _make_output(base, skeleton, adapted, dtype, name: str, parameter: str | None) -> Output:
    stored, change = base.tensors[name], adapted.changes.get(parameter)
    shape = skeleton.shapes.get(parameter, stored.shape)
    if shape is None:
        raise InputError(f"{name} of {base.folder} is in 4 bits and no weight of its model: use an unquantized base")
    # A trained embedding replaces one with fewer rows; nothing else may differ.
    if stored.shape not in (None, shape) and parameter not in adapted.replaced:
        raise InputError(
            f"{name} of {base.folder} has the shape {list(stored.shape)}, and the adapter's model {list(shape)}: name "
            "the model that it was trained on with --base"
        )
    keeps_dtype = dtype is None or not stored.dtype.is_floating_point
    return Output(name, parameter, name, shape, stored.dtype if keeps_dtype else dtype, change)


def _is_untied(adapted: Adapted, tied: Mapping[str, str]) -> bool:
    """True if training made embedding and head, which share a weight, two different ones.

    Raises:
        InputError: LoRA on such a weight, which peft trains in one of its uses and merges into both.
    """
    for name in sorted(adapted.layers & {*tied.keys(), *tied.values()}):
        raise InputError(f"LoRA on {name}, which embedding and head share, has no merged weight: keep the adapter")
    for name, shared in tied.items():
        trained = [adapted.replaced.get(name), adapted.replaced.get(shared)]
        if all(weight is None for weight in trained):
            continue
        if any(weight is None for weight in trained) or not torch.equal(*trained):
            return True
    return False
