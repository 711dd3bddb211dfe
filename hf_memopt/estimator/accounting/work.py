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
# Fused attention -> the places of its queries, of its keys (or of the longest sequence's number) and of is_causal, and
# the FLOPs of its arguments without a causal mask.
_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: (0, 1, 4, lambda args: sdpa_flop_count(*_shapes(args[:3]))),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        *(1, 2, 7),
        lambda args: sdpa_backward_flop_count(*_shapes(args[:4])),
    ),
    _aten._flash_attention_forward: (0, 6, 8, lambda args: _attended(args[0], args[6])),
    _aten._flash_attention_backward: (  # 5 matmuls to forward's 2
        *(1, 9, 11),
        lambda args: _attended(args[1], args[9]) * 5 // 2,
    ),
}
_MATMULS = {_aten.linear, _aten.mm, _aten.bmm, _aten._grouped_mm, _aten.addmm, _aten.baddbmm, _aten._int_mm}


class Attention(NamedTuple):
    """What an attention kernel's rate depends on.

    Attributes:
        head_size: elements.
        keys: that a query sees, of the longest sequence.
        element: bytes of a query's element.
        backward: it computes gradients.
        masked: by a tensor, which flash attention does not take.
    """

    head_size: int
    keys: int
    element: int
    backward: bool
    masked: bool = False


class Kernel(NamedTuple):
    """One operator's work.

    Attributes:
        optimizer: it runs once per step, not once per micro-batch.
        flops: floating-point operations; operators without are bound by memory bandwidth.
        bytes: read and written.
        matmul: bytes of an operand's element of a matmul; 0 for others (with FLOPs: attention and convolutions).
        attention: of a fused kernel of attention.
        recomputed: activation checkpointing runs it a second time, in backward.
    """

    optimizer: bool
    flops: int
    bytes: int
    matmul: int = 0
    attention: Attention | None = None
    recomputed: bool = False


class Work:
    """Counts kernels.

    Attributes:
        kernels: Kernel -> how often it ran.
    """

    def __init__(self) -> None:
        self.kernels: Counter[Kernel] = Counter()

    def note(self, func, args, kwargs, out, phase: str, shapes: tuple | None = None) -> None:
        """Count an operator, unless it only returns a view or allocates.

        Args:
            shapes: all that its output depends on (fake_outputs.Shapes); None where that is not known.
        """
        if phase not in ("forward", "backward", "optimizer"):
            return
        work = _remembered.get(shapes, False) if shapes is not None else False
        if work is False:
            work = _measure(func, args, kwargs, out)
            if shapes is not None:
                if len(_remembered) >= _MOST:
                    _remembered.clear()
                _remembered[shapes] = work
        if work is not None:
            self.kernels[Kernel(phase == "optimizer", *work, phase == "backward" and _records_graph())] += 1


def _records_graph() -> bool:
    """True in a forward pass, also in an autograd function such as bitsandbytes' 4-bit matmul: that runs without
    gradients, but under the hooks by which torch.utils.checkpoint stops what it computes again."""
    return torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


_MOST = 100_000  # remembered calls; a trace has about a thousand different ones
_remembered: dict[tuple, tuple | None] = {}


def _measure(func, args, kwargs, out) -> tuple | None:
    """Kernel's `flops`, `bytes`, `matmul` and `attention`; None where it only returns a view or allocates."""
    if func._overloadpacket in _NO_WORK or func.is_view:
        return None
    touched = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
    if not touched:
        return None
    size = sum(leaf.numel() * leaf.element_size() for leaf in touched)
    matmul = touched[0].element_size() if func._overloadpacket in _MATMULS else 0
    return _flops(func, args, kwargs, out), size, matmul, _attention(func._overloadpacket, args, kwargs)


def _attention(packet, args, kwargs) -> Attention | None:
    if packet not in _ATTENTION:
        return None
    query, longest, causal, _ = _ATTENTION[packet]
    keys = args[longest] if isinstance(args[longest], int) else args[longest].shape[-2]
    visited = _visited(int(keys), args[causal : causal + 1], kwargs)
    masked = kwargs.get("attn_mask") is not None
    return Attention(args[query].shape[-1], visited, args[query].element_size(), query == 1, masked)


def computed_once(kernels: Counter) -> Counter:
    """The kernels without what is computed again in backward."""
    return Counter({kernel: count for kernel, count in kernels.items() if not kernel.recomputed})


def extended(low: Counter, high: Counter, steps: int) -> Counter:
    """The kernels of a deep model, `steps` times the distance from `low` to `high` beyond `low`.

    An optimizer's kernel over all weights at once (foreach, fused) is another one at each depth. Extended, the smaller
    is there a negative number of times, so that sums over all kernels are right.
    """
    kernels = Counter(low)
    for kernel in low.keys() | high.keys():
        kernels[kernel] += (high[kernel] - low[kernel]) * steps
    return Counter({kernel: count for kernel, count in kernels.items() if count})


def _flops(func, args, kwargs, out) -> int:
    packet = func._overloadpacket
    if packet in _ATTENTION:
        *_, causal, count = _ATTENTION[packet]
        return _visited(count(args), args[causal : causal + 1], kwargs)
    if packet is _aten._scaled_dot_product_attention_math:
        return sdpa_flop_count(*_shapes(args[:3]))
    if packet is _aten.linear:  # stays whole where no gradient is recorded, as in bitsandbytes' 4-bit matmul
        return 2 * args[0].numel() * args[1].shape[0]
    # _int_mm counts at the rate of 16 bits: bitsandbytes' quantization takes what 8 bits save. In _grouped_mm every
    # row is multiplied with one expert's weight.
    if packet in (_aten._int_mm, _aten._grouped_mm):
        return 2 * args[0].numel() * args[1].shape[-1]
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula else 0


def _shapes(tensors) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _attended(query: torch.Tensor, keys: int) -> int:
    """FLOPs of forward's two matmuls: every query with as many keys as the longest sequence has.

    Args:
        query: (batch, tokens, heads, head size), or without batch where sequences follow one another.
    """
    return 4 * query.numel() * int(keys)


def _visited(flops: int, is_causal: tuple, kwargs: dict) -> int:
    """The FLOPs that flash kernels compute: with a causal mask they skip the blocks above the diagonal."""
    causal = is_causal[0] if is_causal else kwargs.get("is_causal", False)
    return flops // 2 if causal else flops
