"""Chunked cross entropy: head, loss and gradients are computed for a few tokens at a time.

At 8k tokens and a vocabulary of 128k the logits, their fp32 copy and their gradient are the largest tensors of a step.
Here the head returns LazyLogits, which record elementwise operations (a scale, a soft cap, a cast). The model's loss
function is replaced by one that takes chunks of hidden states through the head, the recorded operations and cross
entropy, and computes gradients in the same pass. Tokens without a label are skipped. Any other use of LazyLogits
computes all logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import IGNORED, has_no_values, inner_model, shifted_labels, uses_loss_function
from hf_memopt.levers.replaced import replace

_VOCABULARY_SLICE = 16_384  # rows of an fp32 head gradient that are accumulated at once
_RECORDED = {torch.tanh, torch.mul, torch.div, torch.true_divide}


class LazyLogits:
    """Logits that are computed on demand: hidden states, the head, and operations applied to its output.

    Args:
        hidden: (…, hidden size).
        head: a torch.nn.Linear.
        steps: elementwise functions, first to last.
    """

    def __init__(self, hidden: torch.Tensor, head: torch.nn.Linear, steps: tuple[Callable, ...] = ()) -> None:
        self.hidden, self.head, self.steps = hidden, head, steps

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.head.out_features))

    @property
    def dtype(self) -> torch.dtype:
        # A recorded float() is the only step that changes the dtype.
        return torch.float32 if any(step is torch.Tensor.float for step in self.steps) else self.hidden.dtype

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def __truediv__(self, other):
        return self._with(lambda logits: logits / other)

    def __mul__(self, other):
        return self._with(lambda logits: logits * other)

    __rmul__ = __mul__

    def float(self):
        return self._with(torch.Tensor.float)

    def contiguous(self):
        return self

    def materialize(self) -> torch.Tensor:
        """Compute all logits."""
        logits = self.head(self.hidden, compute=functional.linear)
        for step in self.steps:
            logits = step(logits)
        return logits

    def _with(self, step: Callable) -> "LazyLogits":
        return LazyLogits(self.hidden, self.head, (*self.steps, step))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # FSDP2 asks every output whether it is a dataclass (torch.distributed.utils)
            raise AttributeError(name)
        return getattr(self.materialize(), name)

    def __getitem__(self, index):
        return self.materialize()[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _RECORDED and isinstance(args[0], cls) and not kwargs:
            return args[0]._with(lambda logits: function(logits, *args[1:]))
        args = [arg.materialize() if isinstance(arg, cls) else arg for arg in args]
        kwargs = {name: arg.materialize() if isinstance(arg, cls) else arg for name, arg in (kwargs or {}).items()}
        return function(*args, **kwargs)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of head(hidden); forward computes the gradients too, chunk by chunk."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, chunk: int, steps, smoothing: float, dtype):
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        used = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        # Accumulating many chunks in 16 bits would lose precision.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if of_bias else None
        for start in range(0, len(hidden), chunk):
            part = hidden[start : start + chunk]
            logits = functional.linear(part, used, None if bias is None else bias.to(dtype))
            with torch.enable_grad():
                leaf = logits.detach().requires_grad_()
                out = leaf
                for step in steps:
                    out = step(out)
                loss = functional.cross_entropy(
                    out.float(), target[start : start + chunk], reduction="sum", label_smoothing=smoothing
                )
                del out, logits
                (d_logits,) = torch.autograd.grad(loss, leaf)
            total += loss.detach()
            del loss, leaf
            if of_hidden:
                torch.mm(d_logits, used, out=d_hidden[start : start + chunk])
            if of_weight:
                _accumulate_matmul(d_weight, d_logits, part)
            if of_bias:
                d_bias += d_logits.sum(0, dtype=wide)
            del d_logits
        ctx.gradients, ctx.labels = (d_hidden, d_weight, d_bias), len(hidden)
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx, scale):
        if ctx.gradients is None:
            raise RuntimeError("backward through a chunked loss works only once: forward computed the gradients")
        (d_hidden, d_weight, d_bias), (weight_type, bias_type), ctx.gradients = ctx.gradients, ctx.types, None
        # Without a label, as a device's part of a shared sample may be, the mean is 0 / 0, and the gradient zero.
        scale = scale if ctx.labels else 0.0
        gradients = [
            None if d_hidden is None else d_hidden.mul_(scale),
            None if d_weight is None else d_weight.mul_(scale).to(weight_type),
            None if d_bias is None else d_bias.mul_(scale).to(bias_type),
        ]
        return (*gradients, None, None, None, None, None)


def _accumulate_matmul(total: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Accumulate d_logitsᵀ · hidden, (vocabulary, hidden size), into `total`."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)
        return
    for start in range(0, len(total), _VOCABULARY_SLICE):
        rows = slice(start, start + _VOCABULARY_SLICE)
        total[rows].add_(d_logits[:, rows].t() @ hidden)


def chunk_loss(model, size: int, label_smoothing: float = 0.0) -> None:
    """Compute a model's loss in chunks while it trains.

    Args:
        model: a transformers model with a language-model head, or peft's around one.
        size: tokens per chunk.
        label_smoothing: as in torch.nn.functional.cross_entropy.

    Raises:
        InputError: the model has no plain linear head, or does not call its `loss_function`.
    """
    inner = inner_model(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is not torch.nn.Linear:
        what = "no head over a vocabulary" if head is None else f"a head of kind {type(head).__name__}"
        raise InputError(f"loss_chunk_size={size} needs a plain linear head: {type(inner).__name__} has {what}")
    if not uses_loss_function(inner):
        raise InputError(
            f"loss_chunk_size={size}: {type(inner).__name__} computes its loss itself, or not that of the next token; "
            "leave it out"
        )
    plain = inner.loss_function

    def promise(hidden, compute=None):
        if compute is not None:  # engines gather a module's weight only while the module is called
            return compute(hidden, head.weight, head.bias)
        if inner.training and torch.is_grad_enabled():
            return LazyLogits(hidden, head)
        return functional.linear(hidden, head.weight, head.bias)

    def loss_function(logits, labels, vocab_size=None, **kwargs):
        if isinstance(logits, LazyLogits):
            return _loss(logits, labels, size, label_smoothing, **kwargs)
        return plain(logits, labels, vocab_size, **kwargs)

    replace(head, "forward", promise)
    replace(inner, "loss_function", loss_function)


def _loss(
    logits: LazyLogits,
    labels,
    size: int,
    smoothing: float,
    num_items_in_batch=None,
    shift_labels=None,
    ignore_index: int = IGNORED,
    **_,
) -> torch.Tensor:
    """transformers' loss of a causal language model (loss_utils.ForCausalLMLoss), in chunks."""
    target = shifted_labels(labels, shift_labels, ignore_index).reshape(-1).to(logits.device)
    hidden = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    counted = target != ignore_index
    if not has_no_values(target):  # in an estimate every token may have a label
        chosen = counted.nonzero().squeeze(1)
        if len(chosen) < len(target):
            hidden, target = hidden[chosen], target[chosen]
    kind = logits.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else logits.head.weight.dtype

    def summed(hidden, weight, bias):
        return _LinearCrossEntropy.apply(hidden, weight, bias, target, size, logits.steps, smoothing, dtype)

    with torch.autocast(kind, enabled=False):
        total = logits.head(hidden.to(dtype), compute=summed)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / (counted.sum() if num_items_in_batch is None else num_items_in_batch)
