"""Values of fake tensors, where they follow from the batch's own: token ids, masks, grids of patches, positions.

Video models ask their inputs how many patches there are, where they go and how long each clip is. Whatever is computed
from known values alone is computed for real beside the fake, so that such questions have answers and the shapes that
depend on them come out right.
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
_MOST = 2**23  # elements; larger ones (masks of all tokens by all tokens) nobody asks for their values
_MADE_OF_NOTHING = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.rand.default, _aten.randn.default}


def know(fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a fake tensor its value."""
    fake.known_value = value
    return fake


def value_of(tensor) -> torch.Tensor | None:
    """The value of a fake tensor; None where it is not known."""
    return getattr(tensor, "known_value", None)


def item_of(tensor):
    """The number that a tensor of one element holds."""
    with unset_fake_temporarily():
        return value_of(tensor).item()


def tensor_of(make):
    """torch.tensor() that takes fake tensors of one element for the numbers that they hold: it reads their bytes."""

    def of(data, *args, **kwargs):
        listed = isinstance(data, list | tuple)
        return make(tree_map(_number, data) if listed else data, *args, **kwargs)

    return of


def list_of(tolist):
    """FakeTensor.tolist() that reads a known value at once, not element by element."""

    def of(tensor):
        if value_of(tensor) is None:
            return tolist(tensor)
        with unset_fake_temporarily():
            return value_of(tensor).tolist()

    return of


def _number(leaf):
    return item_of(leaf) if value_of(leaf) is not None and leaf.dim() == 0 else leaf


def run(func, args, kwargs, call):
    """An operator's fake output, with its value where all that goes in is known.

    Args:
        call: runs the operator on fake tensors.
    """
    args = _with_answers(func, args)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    known = func not in _MADE_OF_NOTHING and all(_has_value(tensor) for tensor in tensors)
    if not known:
        if func._schema.is_mutable:  # what was known of it holds no longer
            _forget(args[0])
        return call(*_without_masks(func, args), **kwargs)
    with unset_fake_temporarily():
        values = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    try:
        out = call(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException):
        out = tree_map(_empty_like, values)
    for fake, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
        if isinstance(fake, FakeTensor) and value.numel() <= _MOST:
            know(fake, value)
    return out


def _forget(changed) -> None:
    for tensor in tree_leaves(changed):
        if value_of(tensor) is not None:
            del tensor.known_value


def _has_value(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or value_of(tensor) is not None


def _real(leaf):
    return value_of(leaf) if isinstance(leaf, FakeTensor) else leaf


def _empty_like(value):
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def _masks(indices) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _without_masks(func, args):
    """A boolean index as the positions that it stands for, whose number its value says."""
    if func is not _aten.index.Tensor or not _masks(args[1]):
        return args
    indices = []
    for index in args[1]:
        if index is None or index.dtype is not torch.bool or value_of(index) is None:
            indices.append(index)
            continue
        with unset_fake_temporarily():
            places = value_of(index).nonzero(as_tuple=True)
        indices += [know(torch.empty(len(place), dtype=torch.int64), place) for place in places]
    return (args[0], indices, *args[2:])


def _with_answers(func, args):
    """Pixels are not zero: SmolVLM takes frames of zeros for padding, which the largest batch has none of."""
    if func is _aten.eq.Scalar and value_of(args[0]) is None and args[0].dtype.is_floating_point and args[1] == 0:
        with unset_fake_temporarily():
            ones = torch.ones((), dtype=args[0].dtype).expand(args[0].shape)
        return (know(torch.empty_like(args[0]), ones), *args[1:])
    return args
