"""Cross entropy without all logits: head and loss a few tokens at a time, gradients included.

At 8k tokens and a vocabulary of 128k the logits, their fp32 copy and their gradient are the largest tensors of a step.
Here the head gives a promise of logits, elementwise operations on it (a scale, a soft cap, a cast) are noted, and the
model's own loss function is replaced by one that takes chunks of hidden states through head, noted operations and
cross entropy, and works out the gradients at once. Tokens without a label are left out. Whoever wants the logits
themselves gets them, all of them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import IGNORED, asks_for_its_loss, inner_model, shifted_labels, without_values
from hf_memopt.levers.replaced import replace

_VOCABULARY_SLICE = 16_384  # rows of the head's gradient that are added up at once, where it is kept in fp32
_TRACED = 3  # chunks that the estimator follows: one after another, they take the same
_NOTED = {torch.tanh, torch.mul, torch.div, torch.true_divide}


class PromisedLogits:
    """Logits that are not there: hidden states, the head, and what was done to its output since.

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
        # A float() afterwards is a step, and does not change what comes before it.
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

    def whole(self) -> torch.Tensor:
        """All logits."""
        logits = self.head(self.hidden, then=functional.linear)
        for step in self.steps:
            logits = step(logits)
        return logits

    def _with(self, step: Callable) -> "PromisedLogits":
        return PromisedLogits(self.hidden, self.head, (*self.steps, step))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole(), name)

    def __getitem__(self, index):
        return self.whole()[index]

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in _NOTED and isinstance(args[0], cls) and not kwargs:
            return args[0]._with(lambda logits: function(logits, *args[1:]))
        args = [arg.whole() if isinstance(arg, cls) else arg for arg in args]
        kwargs = {name: arg.whole() if isinstance(arg, cls) else arg for name, arg in (kwargs or {}).items()}
        return function(*args, **kwargs)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of the cross entropies of head(hidden), with gradients that are worked out on the way."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, target, chunk: int, steps, smoothing: float, dtype):
        of_hidden, of_weight, of_bias = ctx.needs_input_grad[:3]
        used = weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden) if of_hidden else None
        # Sums of many chunks lose digits in 16 bits.
        wide = torch.promote_types(weight.dtype, torch.float32)
        d_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide) if of_bias else None
        starts = range(0, len(hidden), chunk)
        if without_values(hidden) and len(starts) > _TRACED:
            starts = [*starts[: _TRACED - 1], starts[-1]]
        for start in starts:
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
                _add_product(d_weight, d_logits, part)
            if of_bias:
                d_bias += d_logits.sum(0, dtype=wide)
            del d_logits
        ctx.gradients = d_hidden, d_weight, d_bias
        ctx.types = weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx, scale):
        if ctx.gradients is None:
            raise RuntimeError("a chunked loss can be differentiated once only")
        (d_hidden, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        weight_type, bias_type = ctx.types
        found = [
            None if d_hidden is None else d_hidden.mul_(scale),
            None if d_weight is None else d_weight.mul_(scale).to(weight_type),
            None if d_bias is None else d_bias.mul_(scale).to(bias_type),
        ]
        return (*found, None, None, None, None, None)


def _add_product(total: torch.Tensor, d_logits: torch.Tensor, hidden: torch.Tensor) -> None:
    """Add d_logitsᵀ · hidden (vocabulary, hidden size)."""
    if total.dtype == hidden.dtype:
        total.addmm_(d_logits.t(), hidden)
        return
    for start in range(0, len(total), _VOCABULARY_SLICE):
        rows = slice(start, start + _VOCABULARY_SLICE)
        total[rows].add_(d_logits[:, rows].t() @ hidden)


def chunk_loss(model, size: int, label_smoothing: float = 0.0) -> None:
    """Have a model compute its loss in chunks while it trains.

    Args:
        model: a transformers model with a language-model head, or peft's around one.
        size: tokens whose logits are held at once.
        label_smoothing: as torch's cross entropy has it.

    Raises:
        InputError: the model has no plain linear head, or does not ask its `loss_function` for the loss.
    """
    inner = inner_model(model)
    head = inner.get_output_embeddings() if hasattr(inner, "get_output_embeddings") else None
    if type(head) is not torch.nn.Linear:
        what = "no head over a vocabulary" if head is None else f"a head of kind {type(head).__name__}"
        raise InputError(f"loss_chunk_size={size} needs a plain linear head: {type(inner).__name__} has {what}")
    if not asks_for_its_loss(inner):
        raise InputError(f"loss_chunk_size={size}: {type(inner).__name__} computes its loss itself; leave it out")
    plain = inner.loss_function

    def promise(hidden, then=None):
        if then is not None:  # engines gather a module's weight while it is called
            return then(hidden, head.weight, head.bias)
        if inner.training and torch.is_grad_enabled():
            return PromisedLogits(hidden, head)
        return functional.linear(hidden, head.weight, head.bias)

    def loss_function(logits, labels, vocab_size=None, **kwargs):
        if isinstance(logits, PromisedLogits):
            return _loss(logits, labels, size, label_smoothing, **kwargs)
        return plain(logits, labels, vocab_size, **kwargs)

    replace(head, "forward", promise)
    replace(inner, "loss_function", loss_function)


def _loss(
    logits: PromisedLogits,
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
    if not without_values(target):  # tensors without values may all count
        chosen = counted.nonzero().squeeze(1)
        if len(chosen) < len(target):
            hidden, target = hidden[chosen], target[chosen]
    kind = logits.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else logits.head.weight.dtype

    def summed(hidden, weight, bias):
        return _LinearCrossEntropy.apply(hidden, weight, bias, target, size, logits.steps, smoothing, dtype)

    with torch.autocast(kind, enabled=False):
        total = logits.head(hidden.to(dtype), then=summed)
    return total / (counted.sum() if num_items_in_batch is None else _there(num_items_in_batch, total))


def _there(number, tensor: torch.Tensor):
    return number.to(tensor.device) if isinstance(number, torch.Tensor) else number
