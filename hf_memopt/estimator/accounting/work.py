"""The work of a traced job, operator by operator: floating-point operations and bytes, for the time of a step."""

from collections import Counter
from typing import NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

_aten = torch.ops.aten
_NO_WORK = {
    _aten.empty,
    _aten.empty_like,
    _aten.empty_strided,
    _aten.new_empty,
    _aten.new_empty_strided,
    _aten.empty_permuted,
    _aten.detach,
    _aten.lift_fresh,
    _aten.alias,
}


class Kernel(NamedTuple):
    """One operator's work.

    Attributes:
        optimizer: it runs once per step, not once per micro-batch.
        flops: floating-point operations of matmuls and attention; other operators are bound by memory bandwidth.
        bytes: read and written.
    """

    optimizer: bool
    flops: int
    bytes: int


class Work:
    """Counts kernels.

    Attributes:
        kernels: Kernel -> how often it ran.
    """

    def __init__(self) -> None:
        self.kernels: Counter[Kernel] = Counter()

    def note(self, func, args, kwargs, out, phase: str) -> None:
        """Count an operator, unless it only returns a view or allocates."""
        if phase not in ("forward", "backward", "optimizer") or func._overloadpacket in _NO_WORK or func.is_view:
            return
        touched = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        if touched:
            size = sum(leaf.numel() * leaf.element_size() for leaf in touched)
            self.kernels[Kernel(phase == "optimizer", _flops(func, args, kwargs, out), size)] += 1


def extended(low: Counter, high: Counter, steps: int) -> Counter:
    """The kernels of a deep model, `steps` times the distance from `low` to `high` beyond `low`."""
    kernels = Counter(low)
    for kernel in low.keys() | high.keys():
        kernels[kernel] += (high[kernel] - low[kernel]) * steps
    return +kernels


def _flops(func, args, kwargs, out) -> int:
    packet = func._overloadpacket
    if packet in (_aten._scaled_dot_product_flash_attention_for_cpu, _aten._scaled_dot_product_attention_math):
        return sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
    if packet is _aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape)
    if packet is _aten._grouped_mm:  # every row is multiplied with one expert's weight
        rows, inner = (args[0].numel() // args[0].shape[-1], args[0].shape[-1])
        return 2 * rows * inner * args[1].shape[-1]
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0
