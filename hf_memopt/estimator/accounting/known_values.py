"""Values of fake tensors, where they follow from the batch: token ids, masks, labels, grids of patches, positions.

Models and losses compute shapes from the values of their inputs: how many patches there are, how long each clip is,
which tokens are answers. An operator whose inputs all have known values runs on these too, so that its fake output has
a value. Where a shape depends on an unknown value, it is the largest that the other shapes allow.
"""

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hf_memopt.estimator.private_names import Part

_USED = Part.EVERY_JOB.relies_on(
    "torch._C:_DisableTorchDispatch",
    "torch._subclasses.fake_tensor:unset_fake_temporarily()",
    why="operators on known values run for real",
)
_aten = torch.ops.aten
_MAX_ELEMENTS = 2**23  # nothing asks for the values of larger tensors, such as masks of tokens × tokens
# Shapes seldom follow from fractions: larger ones are rotations of positions or interpolated pixels.
_MAX_FRACTIONS = 2**16
_CREATED_WITHOUT_VALUES = {_aten.empty.memory_format, _aten.empty_strided.default}
_RANDOM = torch.Tag.nondeterministic_seeded


def set_value(fake: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give a fake tensor its value."""
    fake.known_value = value
    return fake


def forget(changed) -> None:
    """Drop the values of tensors that change to unknown ones."""
    for tensor in tree_leaves(changed):
        # A view's change is its base's too.
        for each in (tensor, getattr(tensor, "_base", None)):
            if isinstance(each, torch.Tensor):
                vars(each).pop("known_value", None)


def known_value(tensor) -> torch.Tensor | None:
    """The value of a fake tensor; None where it is not known."""
    value = getattr(tensor, "known_value", None)
    # Engines exchange a weight's data for that of another shape.
    return value if value is not None and value.shape == tensor.shape else None


def known_item(tensor):
    """The number that a tensor of one element holds."""
    with torch._C._DisableTorchDispatch():  # a ledger that is on would be asked, which does not know real tensors
        return known_value(tensor).item()


def tensor_from_values(make):
    """torch.tensor() that accepts fake tensors of one element, whose data it could not read."""

    def tensor(data, *args, **kwargs):
        return make(tree_map(_number, data) if isinstance(data, list | tuple) else data, *args, **kwargs)

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


def concerns(func, args, kwargs) -> bool:
    """True if run() is needed for an operator: a value is known, or the output's shape depends on values.

    Of a list of tensors only the first is looked at: optimizers pass hundreds, all without values.
    """
    if func in SHAPED_BY_VALUES:
        return True
    given = (*args, *kwargs.values())
    tensors = [arg[0] if isinstance(arg, list | tuple) and arg else arg for arg in given]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return not tensors or any(map(_has_value, tensors))


def run(func, args, kwargs, call):
    """An operator's fake output, with its value where the values of all inputs are known.

    Args:
        call: runs the operator on fake tensors.
    """
    # SmolVLM takes frames of zeros for padding; the largest batch has none.
    if func is _aten.eq.Scalar and args[1] == 0 and known_value(args[0]) is None and _is_fraction(args[0]):
        out = call(*args, **kwargs)
        with unset_fake_temporarily():
            value = torch.zeros((), dtype=torch.bool).expand(out.shape)
        return set_value(out, value)
    args = _without_known_masks(func, args)
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if func in _CREATED_WITHOUT_VALUES or not all(map(_has_value, tensors)):
        if func._schema.is_mutable:  # its value has changed to an unknown one
            forget(args[0])
        return (
            _LARGEST_OUTPUT[func](*args, **kwargs)
            if func in _LARGEST_OUTPUT
            else call(*_without_unknown_masks(func, args), **kwargs)
        )
    try:
        out = call(*args, **kwargs)
    except (DynamicOutputShapeException, DataDependentOutputException):
        values = _compute(func, args, kwargs)
        empty = tree_map_only(torch.Tensor, lambda value: torch.empty(value.shape, dtype=value.dtype), values)
        return _with_values(empty, values)
    fakes = (leaf for leaf in tree_leaves(out) if isinstance(leaf, FakeTensor))
    if all(map(is_worth_knowing, fakes)) and not (_RANDOM in func.tags and _is_fraction(out)):
        return _with_values(out, _compute(func, args, kwargs))
    if func._schema.is_mutable:
        forget(args[0])
    if func is _aten.rand.default and out.numel() == 1:
        # With the highest random number nothing is left out, no layer by layerdrop and no adapter of LoHa or LoKr by
        # module_dropout (`torch.rand(1) > module_dropout`): such a step needs most.
        with unset_fake_temporarily():
            value = torch.ones(out.shape, dtype=out.dtype)
        return set_value(out, value)
    return out


def _compute(func, args, kwargs):
    with unset_fake_temporarily():
        return func(*tree_map(_real, args), **tree_map(_real, kwargs))


def _with_values(out, values):
    for fake, value in zip(tree_leaves(out), tree_leaves(values), strict=True):
        if isinstance(fake, FakeTensor):
            set_value(fake, value)
    return out


def is_worth_knowing(tensor: torch.Tensor) -> bool:
    """True if shapes may follow from the values of a tensor of that size and type."""
    return tensor.numel() <= (_MAX_FRACTIONS if _is_fraction(tensor) else _MAX_ELEMENTS)


def _is_fraction(tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point


def _has_value(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) or known_value(tensor) is not None


def _real(leaf):
    return known_value(leaf) if isinstance(leaf, FakeTensor) else leaf


def _is_mask(index) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _without_known_masks(func, args):
    """Indexing by a boolean mask as indexing by its positions, whose number follows from the mask's value."""
    if func is not _aten.index.Tensor:
        return args
    indices = []
    for index in args[1]:
        if not _is_mask(index) or known_value(index) is None:
            indices.append(index)
            continue
        with unset_fake_temporarily():
            positions = known_value(index).nonzero(as_tuple=True)
        indices += [set_value(torch.empty(len(along), dtype=torch.int64), along) for along in positions]
    return (args[0], indices, *args[2:])


def _without_unknown_masks(func, args):
    """Indexing by a boolean mask without a value as indexing by all of its positions."""
    if func is not _aten.index.Tensor:
        return args
    indices = []
    for index in args[1]:
        indices += [torch.empty(index.numel(), dtype=torch.int64) for _ in index.shape] if _is_mask(index) else [index]
    return (args[0], indices, *args[2:])


def _all_distinct(tensor, *args, **kwargs):
    """The distinct elements, and for each element its place among them and its number."""
    places = torch.empty(tensor.shape, dtype=torch.int64)
    return torch.empty(tensor.numel(), dtype=tensor.dtype), places, torch.empty(tensor.numel(), dtype=torch.int64)


def _all_rows_distinct(tensor, dim, *args, **kwargs):
    count = tensor.shape[dim]
    return torch.empty_like(tensor), torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)


# Operators whose output's shape depends on values: the largest output.
_LARGEST_OUTPUT = {
    _aten.nonzero.default: lambda tensor: torch.empty((tensor.numel(), tensor.dim()), dtype=torch.int64),
    _aten.masked_select.default: lambda tensor, mask: torch.empty(
        torch.broadcast_shapes(tensor.shape, mask.shape).numel(), dtype=tensor.dtype
    ),
    _aten._unique2.default: _all_distinct,
    _aten.unique_dim.default: _all_rows_distinct,
    _aten.unique_consecutive.default: _all_distinct,
}
SHAPED_BY_VALUES = {*_LARGEST_OUTPUT, _aten.index.Tensor, _aten.eq.Scalar}


class ConstructorValues(TorchDispatchMode):
    """Values for constructors on fake tensors: vision models read each layer's rate of dropped paths from a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and known_value(args[0]) is not None:
            return known_item(args[0])
        return run(func, args, kwargs, func) if concerns(func, args, kwargs) else func(*args, **kwargs)
