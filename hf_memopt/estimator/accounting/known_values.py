"""Values of fake tensors, where they follow from the batch: token ids, masks, grids of patches, positions.

Video models compute shapes from the values of their inputs: how many patches there are, where they go, how long each
clip is. An operator whose inputs all have known values runs on these too, so that its fake output has a value.
"""

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._pytree import tree_leaves, tree_map

_aten = torch.ops.aten
_MAX_ELEMENTS = 2**23  # nothing asks for the values of larger tensors, such as masks of tokens × tokens
_CREATED_WITHOUT_VALUES = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.rand.default,
    _aten.randn.default,
}


def set_value(fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a fake tensor its value."""
    fake.known_value = value
    return fake


def known_value(tensor) -> torch.Tensor | None:
    """The value of a fake tensor; None where it is not known."""
    return getattr(tensor, "known_value", None)


def known_item(tensor):
    """The number that a tensor of one element holds."""
    with unset_fake_temporarily():
        return known_value(tensor).item()


def tensor_from_values(make):
    """torch.tensor() that accepts fake tensors of one element, whose data it could not read."""

    def tensor(data, *args, **kwargs):
        listed = isinstance(data, list | tuple)
        return make(tree_map(_number, data) if listed else data, *args, **kwargs)

    return tensor


def tolist_from_values(tolist):
    """FakeTensor.tolist() that reads a known value at once, not element by element."""

    def list_values(tensor):
        if known_value(tensor) is None:
            return tolist(tensor)
        with unset_fake_temporarily():
            return known_value(tensor).tolist()

    return list_values


def _number(leaf):
    return known_item(leaf) if known_value(leaf) is not None and leaf.dim() == 0 else leaf


def run(func, args, kwargs, call):
    """An operator's fake output, with its value where the values of all inputs are known.

    Args:
        call: runs the operator on fake tensors.
    """
    args = _without_zeros(func, args)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    known = func not in _CREATED_WITHOUT_VALUES and all(_has_value(tensor) for tensor in tensors)
    if not known:
        if func._schema.is_mutable:  # its value has changed to an unknown one
            _forget(args[0])
        return call(*_without_masks(func, args), **kwargs)
    with unset_fake_temporarily():
        values = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    try:
        out = call(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException):
        out = tree_map(_empty_like, values)
    for fake, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
        if isinstance(fake, FakeTensor) and value.numel() <= _MAX_ELEMENTS:
            set_value(fake, value)
    return out


def _forget(changed) -> None:
    for tensor in tree_leaves(changed):
        if known_value(tensor) is not None:
            del tensor.known_value


def _has_value(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or known_value(tensor) is not None


def _real(leaf):
    return known_value(leaf) if isinstance(leaf, FakeTensor) else leaf


def _empty_like(value):
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _masks(indices) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _without_masks(func, args):
    """Indexing by a boolean mask as indexing by its positions, whose number follows from the mask's value."""
    if func is not _aten.index.Tensor or not _masks(args[1]):
        return args
    indices = []
    for index in args[1]:
        if index is None or index.dtype is not torch.bool or known_value(index) is None:
            indices.append(index)
            continue
        with unset_fake_temporarily():
            positions = known_value(index).nonzero(as_tuple=True)
        indices += [set_value(torch.empty(len(along), dtype=torch.int64), along) for along in positions]
    return (args[0], indices, *args[2:])


def _without_zeros(func, args):
    """Comparison of pixels with 0: none is. SmolVLM takes frames of zeros for padding; the largest batch has none."""
    if func is _aten.eq.Scalar and known_value(args[0]) is None and args[0].dtype.is_floating_point and args[1] == 0:
        with unset_fake_temporarily():
            ones = torch.ones((), dtype=args[0].dtype).expand(args[0].shape)
        return (set_value(torch.empty_like(args[0]), ones), *args[1:])
    return args
