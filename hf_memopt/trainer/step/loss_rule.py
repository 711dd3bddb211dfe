"""The relation of a chunk's loss to that of its micro-batch.

The form of the mean follows from the kind of model or TRL trainer, or from what the user declares. At the first OOM it
is compared on the rows of the batch that failed: the loss of a group of samples must be the weighted sum of its
halves' losses.
"""

import contextlib
import inspect
import re
from collections.abc import Iterator
from enum import StrEnum
from math import isfinite
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import set_seed
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_memopt.errors import InputError, one_line
from hf_memopt.levers.language_model import inner_model
from hf_memopt.oom.classify import OomKind, diagnose, free_memory
from hf_memopt.presets.trl_configs import trl_trainer
from hf_memopt.trainer.step.split import copy_batch
from hf_memopt.trainer.step.step_state import StepState, fingerprint, numbers

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

# Relative rounding error of a loss computed in batches of another size.
_FINE = {torch.float32: 1e-5, torch.float64: 2e-6}  # fp64 models compute norms and softmax in fp32
_COARSE = 1e-2  # half precision, TF32
_SAME = 1e-7  # of a loss that is computed twice from the same tensors


class LossRule(StrEnum):
    """The relation of a micro-batch's loss to its samples' losses."""

    SUM = "a sum over labels, divided by num_items_in_batch of the whole step"  # losses of chunks add up
    LABELS = "a mean over labels"  # not -100, shifted
    UNSHIFTED = "a mean over unshifted labels"
    SAMPLES = "a mean over samples"

    def weight(self, trainer: "MemoryTrainer", micro_batch: dict[str, Any], chunk: dict[str, Any]) -> float:
        """The weight of a chunk's loss in the loss of its micro-batch."""
        if self is LossRule.SUM:
            return 1.0
        # Refuse answers beyond the tokens, which heads for question answering leave out of their mean.
        tokens = micro_batch.get("input_ids")
        for name in ("start_positions", "end_positions"):
            place = micro_batch.get(name)
            if (
                isinstance(place, torch.Tensor)
                and isinstance(tokens, torch.Tensor)
                and (place >= tokens.shape[-1]).any()
            ):
                raise InputError(f"{name} lie beyond the tokens, and are left out of the loss")
        rule = self if self.count_items(trainer, micro_batch) else LossRule.SAMPLES  # every label is -100
        return rule.count_items(trainer, chunk) / rule.count_items(trainer, micro_batch)

    def count_items(self, trainer: "MemoryTrainer", inputs: dict[str, Any]) -> int:
        """The number of items that the mean is over."""
        if self is LossRule.SAMPLES:
            return trainer.count_samples(inputs)
        labels = inputs["labels"]
        shifted = self is LossRule.LABELS and labels.dim() > 1
        return int((labels[..., 1:] if shifted else labels).ne(-100).sum())


# Names of transformers' classes with a loss that is a mean, and over what. Others have losses that compare samples
# (contrastive, retrieval), are normalized over the batch (detection, speech) or have several terms (pretraining).
_HEADS = {
    r"ForCausalLM|LMHeadModel|BertGenerationDecoder": LossRule.LABELS,
    r"ForConditionalGeneration|ForVisionText2Text": LossRule.LABELS,  # of decoders alone; else UNSHIFTED
    r"ForMaskedLM|ForTokenClassification": LossRule.UNSHIFTED,
    r"ForSpeechToText|ForTextToText|MTModel|EncoderDecoderModel": LossRule.UNSHIFTED,
    r"For(Sequence|Image|Video|Audio)Classification|ForMultipleChoice|ForNextSentencePrediction": LossRule.UNSHIFTED,
    r"ForQuestionAnswering(Simple)?": LossRule.SAMPLES,
}
# Losses that these classes name in forward() and that are part of no other mean. The router's is refused before.
_MEANS = {"loss", "loss_function", "CrossEntropyLoss", "BCEWithLogitsLoss", "MSELoss", "cross_entropy", "lm_loss"} | {
    *("mlm_loss_fct", "aux_loss", "load_balancing_loss_func", "router_z_loss_func")
}
DECLARED = {"sample_mean": (LossRule.SAMPLES,), "token_mean": (LossRule.SUM, LossRule.LABELS, LossRule.UNSHIFTED)}


def known_mean(trainer: "MemoryTrainer") -> LossRule | None:
    """The mean of transformers' or TRL's own loss: what it is over; None where the loss is no such mean."""
    kind = trl_trainer(trainer)
    if kind is not None:
        return LossRule.LABELS if kind.__name__ == "SFTTrainer" else LossRule.SAMPLES
    model = inner_model(trainer.accelerator.unwrap_model(trainer.model))
    name = type(model).__name__
    rule = next((rule for heads, rule in _HEADS.items() if re.search(f"({heads})$", name)), None)
    named = _losses_named(type(model).forward)
    if rule is None or (named - _MEANS and not type(model).forward.__module__.startswith("liger_kernel")):
        return None
    shifts = not getattr(model.config, "is_encoder_decoder", False)
    if rule is LossRule.LABELS and trainer.label_smoother is not None:
        shifts = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # as Trainer.compute_loss decides
    return LossRule.UNSHIFTED if rule is LossRule.LABELS and not shifts else rule


def _takes_items(trainer: "MemoryTrainer") -> bool:
    """True if a known loss divides by num_items_in_batch: transformers' loss functions do, losses within forward()
    do not."""
    forward = type(inner_model(trainer.accelerator.unwrap_model(trainer.model))).forward
    of_trainer = trl_trainer(trainer) is not None or trainer.label_smoother is not None
    return of_trainer or "loss_function" in _losses_named(forward) or forward.__module__.startswith("liger_kernel")


def _losses_named(forward) -> set[str]:
    return {
        name
        for name in inspect.unwrap(forward).__code__.co_names
        if re.search("loss|^cross_entropy$", name, re.IGNORECASE) and not re.search("_coef(ficient)?$", name)
    }


def find_rule(trainer: "MemoryTrainer", inputs: dict[str, Any], num_items) -> LossRule:
    """Determine the rule of a trainer's loss.

    Known losses are computed in eval mode, where nothing is random. A declared one is computed as in training, but
    without dropout, since it may have terms in training only; chunks draw other dropout masks than the whole.

    Args:
        inputs: a micro-batch of at least two samples that ran out of memory.
        num_items: the Trainer's num_items_in_batch; None where it counts none.

    Raises:
        InputError: the loss is no such sum or mean on these samples, changes what the trainer keeps, or is random.
    """
    declared = trainer.memory_args.loss_reduction if trainer._runner.own_loss else None
    candidates = DECLARED[declared] if declared else (LossRule.SUM, known_mean(trainer))
    candidates = [rule for rule in candidates if rule is not LossRule.SUM or num_items is not None]
    if not isinstance(inputs.get("labels"), torch.Tensor):
        candidates = [rule for rule in candidates if rule is LossRule.SAMPLES or rule is LossRule.SUM]
    if not candidates:
        raise InputError("the batch has no labels")
    measure = _Measure(trainer, inputs, num_items)
    with _as_in_training(trainer, measure.state, bool(declared)), _failing_loss():
        if declared:
            measure.check_repeats()
        compared = [loss for group in _groups(trainer.count_samples(inputs)) if (loss := measure.compare(group))]
        fits = [rule for rule in candidates if all(measure.holds(rule, group) for group in compared)]
        if compared and {LossRule.LABELS, LossRule.UNSHIFTED} <= {*fits} and inputs["labels"].dim() > 1:
            # Samples of nearly one length: both are within the rounding here, and one is wrong for other samples.
            fits.remove(LossRule.LABELS if measure.reads_first_label(compared[-1][0]) else LossRule.UNSHIFTED)
    if not compared:
        if declared:
            raise InputError("no two samples fit together, so its loss_reduction cannot be checked")
        # Both may be left, and nothing tells them apart: the class says whether its loss takes the number of items.
        return candidates[0] if _takes_items(trainer) else candidates[-1]
    if not fits:
        differing = (group for group in compared if not any(measure.holds(rule, group) for rule in candidates))
        (start, _, stop), (together, *halves) = next(differing, compared[0])
        as_declared = f", as loss_reduction={declared} says" if declared else ""
        raise InputError(
            f"the loss of {stop - start} samples ({together:.6g}; in halves {halves[0]:.6g} and {halves[1]:.6g}) is "
            f"not {' or '.join(candidates)}{as_declared}"
        )
    return fits[0]


def _groups(samples: int) -> list[tuple[int, int, int]]:
    """Groups of a batch to compare with their halves, as (start, middle, stop): the whole, each half, and smaller ones
    at its start, since none of the larger may fit."""
    groups, middle = [(0, samples // 2, samples)], samples // 2
    groups.append((middle, (middle + samples) // 2, samples))
    while middle > 1:
        groups.append((0, middle // 2, middle))
        middle //= 2
    return [group for group in groups if group[0] < group[1] < group[2]]


class _Measure:
    """Losses of parts of a batch.

    Attributes:
        state: what every loss starts from.
    """

    def __init__(self, trainer: "MemoryTrainer", inputs: dict[str, Any], num_items) -> None:
        self._trainer, self._inputs, self._num_items = trainer, inputs, num_items
        self._declared = trainer._runner.own_loss
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self.state = StepState.now(trainer)
        weight = next(self._model.parameters())
        fine = weight.device.type == "cpu" and trainer.accelerator.mixed_precision == "no"
        self._tolerance = _FINE.get(weight.dtype, _COARSE) if fine else _COARSE

    def compare(self, group: tuple[int, int, int]) -> tuple[tuple[int, int, int], list[float]] | None:
        """The losses of a group and of its halves; None where the group does not fit, or has no labels."""
        start, middle, stop = group
        try:
            losses = [self._loss(*part) for part in ((start, stop), (start, middle), (middle, stop))]
            return (group, losses) if isfinite(losses[0]) else None  # not finite where there are no labels
        except Exception as error:
            if diagnose(error).kind is OomKind.NOT_MEMORY:
                raise
        free_memory()
        return None

    def holds(self, rule: LossRule, compared: tuple[tuple[int, int, int], list[float]]) -> bool:
        """True if a group's loss is the weighted sum of its halves'."""
        (start, middle, stop), (together, *halves) = compared
        group = self._part(start, stop)
        parts = [self._part(start, middle), self._part(middle, stop)]
        weights = [rule.weight(self._trainer, group, part) for part in parts]
        # Halves of weight 0 are left out: their losses are means over no label, NaN.
        total = sum(weight * loss for weight, loss in zip(weights, halves, strict=True) if weight)
        largest = max((abs(loss) for loss in (together, *halves) if isfinite(loss)), default=0.0)
        return abs(total - together) <= self._tolerance * largest

    def reads_first_label(self, group: tuple[int, int, int]) -> bool:
        """True if a loss depends on the sequences' first labels, which one over shifted labels does not see."""
        start, _, stop = group
        losses = []
        for first in (self._inputs["labels"][self._inputs["labels"] != -100][0], -100):
            part = self._part(start, stop)
            part["labels"] = part["labels"].clone()
            part["labels"][:, 0] = first
            losses.append(self._loss_of(part))
        return not abs(losses[0] - losses[1]) <= _SAME * abs(losses[0])  # NaN where nothing but first labels counts

    def check_repeats(self) -> None:
        """Compute the loss of one part twice.

        Raises:
            InputError: it changes what the trainer or the model keeps, or draws random numbers.
        """
        few = max(1, min(2, self._trainer.count_samples(self._inputs) // 2))
        part = (0, few)
        before, buffers = fingerprint(self._trainer), self._trainer._runner.buffers
        gradients, weights = self._gradients(), buffers.written()
        first = self._loss(*part, restore=False)
        after, counted = fingerprint(self._trainer), numbers(self._trainer)
        changed = next((name for name in after if after[name] != before.get(name)), "")
        changed = f"the trainer's {changed}" if changed else buffers.changed_since(self.state)
        if (self._gradients(), buffers.written()) != (gradients, weights):
            changed = "weights or gradients"
        self.state.restore(self._trainer)
        if changed:
            raise InputError(f"the loss changes {changed}, which chunks would change more often than the whole")
        set_seed(torch.initial_seed() % 2**31 + 1)
        if abs(self._loss(*part) - first) > self._tolerance * abs(first):
            raise InputError("the loss of the same samples is another at every call: random numbers, or kept state")
        self._loss(few, 2 * few, restore=False)
        differs = [name for name, number in numbers(self._trainer).items() if number != counted.get(name)]
        self.state.restore(self._trainer)
        if differs:
            raise InputError(f"the loss keeps {differs[0]}, a number that depends on the samples of a batch")

    def _gradients(self) -> list[tuple[int, int] | None]:
        gradients = (weight.grad for weight in self._model.parameters())
        return [gradient if gradient is None else (id(gradient), gradient._version) for gradient in gradients]

    def _part(self, start: int, stop: int) -> dict[str, Any]:
        return type(self._inputs)(self._trainer.split_batch(self._inputs, start, stop))

    def _loss(self, start: int, stop: int, restore: bool = True) -> float:
        return self._loss_of(self._part(start, stop), restore)

    def _loss_of(self, part: dict[str, Any], restore: bool = True) -> float:
        trainer = self._trainer
        prepared = trainer._prepare_inputs(copy_batch(part))
        alone = _RefuseCollectives() if trainer.args.world_size > 1 else contextlib.nullcontext()
        try:
            graph = torch.set_grad_enabled(self._declared and self._model.training)
            with graph, alone, trainer.compute_loss_context_manager():
                return float(trainer.compute_loss(self._model, prepared, num_items_in_batch=self._num_items))
        finally:
            if restore:
                self.state.restore(trainer)


@contextlib.contextmanager
def _failing_loss() -> Iterator[None]:
    """Turn a loss's error on chunks, unless it is about memory, into an InputError: it cannot be split."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        if diagnose(error).kind is not OomKind.NOT_MEMORY:
            raise
        raise InputError(f"the loss of a chunk fails ({type(error).__name__}: {one_line(error)})") from error


class _RefuseCollectives(TorchDispatchMode):
    """Refuses communication: processes that split their micro-batches differently would wait for each other."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            raise InputError(f"the loss communicates with other processes ({func.__name__})")
        return func(*args, **(kwargs or {}))


_DROPOUTS = {
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "feature_dropout"),
    *("alpha_dropout", "feature_alpha_dropout"),
}


class _NoDropout(TorchFunctionMode):
    """Turns dropout off without leaving training mode: its masks would differ between a group and its halves."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextlib.contextmanager
def _as_in_training(trainer: "MemoryTrainer", state: StepState, own: bool) -> Iterator[None]:
    """A context for computing losses, after which modes, random states, buffers and metrics are as before."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    modes = {module: module.training for module in model.modules()}
    try:
        if not own:
            model.eval()
        with _NoDropout() if own else contextlib.nullcontext():
            yield
    finally:
        for module, training in modes.items():
            module.training = training
        state.restore(trainer)
