"""How a chunk's loss relates to that of its micro-batch, determined by running the loss.

Nothing declares what a model or a compute_loss does with num_items_in_batch, or what its mean is over. So two samples
are run together and one by one, without gradients, to see which rule gives their loss together from their losses
alone. Where none does (contrastive losses, weighted means, …), micro-batches must not be split.
"""

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from math import isfinite
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_memopt.errors import InputError, one_line
from hf_memopt.levers.language_model import inner_model
from hf_memopt.oom.classify import OomKind, diagnose
from hf_memopt.trainer.split import copy_batch
from hf_memopt.trainer.step_state import StepState

_SAMPLES = 2
_NEGATIVE_LOG_LIKELIHOODS = (torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward)
KNOWN = ("transformers.", "trl.", "hf_memopt.")  # packages whose losses are not run before training
# Relative rounding error of a loss computed in batches of another size.
_FINE = {torch.float32: 1e-5, torch.float64: 2e-6}  # fp64 models compute norms and softmax in fp32
_COARSE = 1e-2  # half precision, TF32


class LossRule(StrEnum):
    """What the loss of a micro-batch is of its samples' losses."""

    SUM = "sum"  # divided by num_items_in_batch of the window: losses of chunks add up
    LABELS = "mean over labels"  # not -100, shifted where the model shifts them
    UNSHIFTED = "mean over unshifted labels"
    SAMPLES = "mean over samples"

    def weight(self, trainer, whole: dict[str, Any], chunk: dict[str, Any]) -> float:
        """The weight of a chunk's loss in the loss of its micro-batch."""
        if self is LossRule.SUM:
            return 1.0
        _check_spans(whole)
        rule = self if self.count_items(trainer, whole) else LossRule.SAMPLES  # every label is -100
        return rule.count_items(trainer, chunk) / rule.count_items(trainer, whole)

    def count_items(self, trainer, inputs: dict[str, Any]) -> int:
        """The number of items that the mean is over."""
        if self is LossRule.SAMPLES:
            return trainer.count_samples(inputs)
        labels = inputs["labels"]
        # Trainer._loss_shifts_labels: what transformers 5.23 counts num_items_in_batch by, private to it.
        shifted = self is LossRule.LABELS and labels.dim() > 1 and trainer._loss_shifts_labels
        return int((labels[..., 1:] if shifted else labels).ne(-100).sum())


def _check_spans(inputs: dict[str, Any]) -> None:
    """Refuse answers beyond the tokens, which heads for question answering leave out of their mean.

    Raises:
        InputError: there are such answers, so that the loss is not a mean over samples.
    """
    tokens = inputs.get("input_ids")
    for name in ("start_positions", "end_positions"):
        place = inputs.get(name)
        if isinstance(place, torch.Tensor) and isinstance(tokens, torch.Tensor) and (place >= tokens.shape[-1]).any():
            raise InputError(f"{name} lie beyond the tokens, and are left out of the loss")


def has_own_loss(trainer) -> bool:
    """Whether the loss comes from neither transformers nor TRL, but from a user's trainer, function or model."""
    model = inner_model(trainer.accelerator.unwrap_model(trainer.model))
    known = all(kind.__module__.startswith(KNOWN) for kind in (trainer.compute_loss, type(model)))
    return trainer.compute_loss_func is not None or not known


def find_rule(trainer, inputs: dict[str, Any], num_items) -> LossRule:
    """Determine the rule of a trainer's loss.

    Args:
        inputs: a micro-batch of at least two samples.
        num_items: the Trainer's num_items_in_batch of the window; None where it counts none.

    Raises:
        InputError: no rule holds, or rounding hides which of two does.
    """
    group = _distinguishing_samples(trainer, inputs)
    count = trainer.count_samples(group)
    single = [type(inputs)(trainer.split_batch(group, at, at + 1)) for at in range(count)]
    with _eval_mode(trainer) as model, _failing_loss():
        together, *losses = [_loss(trainer, model, part, num_items) for part in (group, *single)]
    rules = _candidates(trainer, group, num_items)
    sums = {rule: _weighted_sum(trainer, rule, group, single, losses) for rule in rules}
    close = _tolerance(trainer) * max((abs(loss) for loss in (together, *losses) if isfinite(loss)), default=0.0)
    holding = [rule for rule in rules if abs(sums[rule] - together) <= close]
    if not holding:
        raise InputError(
            f"the loss of {count} samples together ({together:.6g}) is neither the sum nor a mean of their own losses"
        )
    if len(holding) > 1 and has_own_loss(trainer):
        raise InputError(f"the loss may be a {' or a '.join(holding)}, which its rounding hides")
    return holding[0]


def _weighted_sum(trainer, rule: LossRule, group, single: list[dict[str, Any]], losses: list[float]) -> float:
    """The loss of a group by a rule. Samples of weight 0 are left out: their losses are means over no label, NaN."""
    weights = [rule.weight(trainer, group, part) for part in single]
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)


def _candidates(trainer, inputs: dict[str, Any], num_items) -> list[LossRule]:
    rules = [LossRule.SUM] if num_items is not None else []
    labels = inputs.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim() and not labels.is_floating_point():
        rules += [LossRule.LABELS] if labels.dim() > 1 or labels.eq(-100).any() else []
        rules += [LossRule.UNSHIFTED] if labels.dim() > 1 and trainer._loss_shifts_labels else []
    return [*rules, LossRule.SAMPLES]


def _distinguishing_samples(trainer, inputs: dict[str, Any]) -> dict[str, Any]:
    """Two neighbouring samples of a micro-batch, with labels that distinguish the rules.

    With equal numbers of labels, means over samples and over labels are the same; with a single class, class weights
    do not show.
    """
    labels = inputs.get("labels")
    by_class = isinstance(labels, torch.Tensor) and labels.dim() and not labels.is_floating_point()
    start = _most_labels(labels) if by_class and labels.dim() > 1 else 0
    group = type(inputs)(trainer.split_batch(inputs, start, start + _SAMPLES))
    if not by_class:
        return group
    labels = group["labels"].clone()
    classes = getattr(getattr(trainer.model, "config", None), "num_labels", 1)
    if labels.dim() == 1 and classes > 1:
        labels = torch.arange(len(labels), device=labels.device).remainder(classes).where(labels.ge(0), labels)
    elif labels.dim() == 2:
        labels = _few_labels(labels)
    group["labels"] = labels
    return group


def _few_labels(labels: torch.Tensor) -> torch.Tensor:
    """Keep few labels, since losses of single tokens differ more than means of many.

    The first sample keeps its last label and gets one at position 0, which counts only where labels are not shifted;
    the second keeps its last three.
    """
    first, second = (row.ne(-100).nonzero().flatten() for row in labels)
    if len(first) < 2 or len(second) < 2:
        return labels
    few = torch.full_like(labels, -100)
    few[0, 0], few[0, first[-1]] = labels[0, first[0]], labels[0, first[-1]]
    few[1, second[1:][-3:]] = labels[1, second[1:][-3:]]
    return few


def _most_labels(labels: torch.Tensor) -> int:
    """Index of the first of two neighbours that both have labels, as many as possible."""
    counts = labels.ne(-100).flatten(1).sum(dim=1)
    return int(torch.minimum(counts[:-1], counts[1:]).argmax())


def _loss(trainer, model, inputs: dict[str, Any], num_items) -> float:
    prepared = trainer._prepare_inputs(copy_batch(inputs))
    alone = _RefuseCollectives() if trainer.args.world_size > 1 else contextlib.nullcontext()
    means = _RefuseOtherMeans(ignores_any="start_positions" in inputs)
    with torch.no_grad(), alone, means, trainer.compute_loss_context_manager():
        return float(trainer.compute_loss(model, prepared, num_items_in_batch=num_items))


@contextlib.contextmanager
def _failing_loss() -> Iterator[None]:
    """Turn a loss's error on single samples, unless it is about memory, into an InputError: it cannot be split."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if diagnose(error).kind is not OomKind.NOT_MEMORY:
            raise
        raise InputError(f"the loss of single samples fails ({type(error).__name__}: {one_line(error)})") from error


class _RefuseOtherMeans(TorchDispatchMode):
    """Refuses cross entropies with class weights, or with another ignore_index than -100, before they run.

    Two samples may have none of the labels that would show them, and a label out of range ends a CUDA process.

    Args:
        ignores_any: allow any ignore_index: question answering uses the number of tokens, which LossRule checks.
    """

    def __init__(self, ignores_any: bool) -> None:
        super().__init__()
        self._ignores_any = ignores_any

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in _NEGATIVE_LOG_LIKELIHOODS:
            _, _, weight, reduction, ignored = args
            if reduction == 1 and weight is not None and weight.ne(weight[0]).any():
                raise InputError("the loss is neither the sum nor a mean of their own losses: it has class weights")
            if reduction == 1 and ignored != -100 and not self._ignores_any:
                raise InputError(f"the loss is a mean over labels that are not {ignored}, and only -100 is known")
        return func(*args, **(kwargs or {}))


class _RefuseCollectives(TorchDispatchMode):
    """Refuses collectives: processes that split their micro-batches differently would wait for each other."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            raise InputError(f"the loss communicates with other processes ({func.__name__})")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _eval_mode(trainer) -> Iterator[torch.nn.Module]:
    """A context with the model in eval mode, after which modes, random states and metrics are as before."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = StepState.now(trainer)
    modes = {module: module.training for module in model.modules()}
    try:
        yield model.eval()
    finally:
        for module, training in modes.items():
            module.training = training
        state.restore(trainer)


def _tolerance(trainer) -> float:
    weight = next(trainer.model.parameters())
    fine = weight.device.type == "cpu" and trainer.accelerator.mixed_precision == "no"
    return _FINE.get(weight.dtype, _COARSE) if fine else _COARSE
