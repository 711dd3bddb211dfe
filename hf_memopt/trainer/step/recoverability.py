"""Decide if a trainer's micro-batches may run again, and in chunks.

Losses of chunks add up where the loss is a sum or a mean over samples. A loss that compares the samples of a batch has
another value in chunks, without any exception; a step that keeps state of its own repeats it. So what is not code of
known libraries has to be declared, or is refused.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_memopt.compatibility.rules import STEPS_IN_BACKWARD
from hf_memopt.levers.language_model import inner_model
from hf_memopt.presets.trl_configs import trl_trainer
from hf_memopt.trainer.step.known_code import overridden_evaluation, overridden_loss, overridden_step
from hf_memopt.trainer.step.loss_rule import known_mean
from hf_memopt.trainer.step.process_metrics import gathers_metrics_alone
from hf_memopt.trainer.step.split import KtoLayout, PairLayout, RowLayout, UnpaddedLayout

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

# Batch layouts of TRL 1.16's trainers. Its other trainers generate, or keep state between micro-batches.
_TRL_LAYOUTS = {
    "SFTTrainer": RowLayout,
    "DPOTrainer": PairLayout,
    "RewardTrainer": PairLayout,
    "KTOTrainer": KtoLayout,
}
# TRL 1.16's DPO losses that sort the batch (aot) or average over its tokens (sft) instead of its pairs.
_ACROSS_PAIRS = {"aot", "aot_unpaired", "sft"}
_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm  # of 1, 2 and 3 dimensions, and the synchronized one
_DECLARE = 'if the loss is a mean over samples or tokens, set loss_reduction="sample_mean" or "token_mean"'


@dataclass(frozen=True)
class Recoverability:
    """The ways in which a trainer's steps can be recovered.

    Attributes:
        layout: how batches hold their samples.
        repeats: a micro-batch may run again, with the same gradients.
        splits: the gradients of its chunks add up to its own.
        reason: why one of the two does not hold; "" where both do.
        own_loss: the loss, the model or a hook is a user's own.
    """

    layout: RowLayout
    repeats: bool = True
    splits: bool = True
    reason: str = ""
    own_loss: bool = False


def assess_recoverability(trainer: "MemoryTrainer") -> Recoverability:
    """Decide from a trainer's class, loss, model and engine."""
    kind = trl_trainer(trainer)
    layout = _TRL_LAYOUTS.get(kind.__name__, RowLayout)() if kind else RowLayout()
    if kind is not None and getattr(trainer, "padding_free", False) and kind.__name__ == "SFTTrainer":
        layout = UnpaddedLayout()
    own_loss, why_not = _own_loss(trainer)
    not_again = _why_not_repeated(trainer, kind) or _why_no_step_repeats(trainer) or why_not
    reason = not_again or _why_not_split(trainer, kind)
    return Recoverability(layout, repeats=not not_again, splits=not reason, reason=reason, own_loss=own_loss)


def why_not_evaluated_in_chunks(trainer: "MemoryTrainer") -> str:
    """The reason that an evaluation batch does not run again, in chunks; "" where it does."""
    kind = trl_trainer(trainer)
    if trainer.args.world_size > 1:
        return "processes that evaluate together cannot repeat a batch"
    if kind is not None and kind.__name__ not in _TRL_LAYOUTS:
        return f"{kind.__name__} evaluates groups of completions, which cannot be split"
    if own := overridden_evaluation(trainer):
        return f"{own}, which cannot run again"
    return _why_no_step_repeats(trainer) or _own_loss(trainer)[1]


def _why_no_step_repeats(trainer: "MemoryTrainer") -> str:
    own = overridden_step(trainer)
    return f"{own}, which cannot run again" if own else ""


def _own_loss(trainer: "MemoryTrainer") -> tuple[bool, str]:
    """True if a declaration decides about the loss, and what has to be declared; "" where nothing has."""
    if trainer.memory_args.loss_reduction is not None:
        return True, ""
    own = overridden_loss(trainer)
    if not own and trainer.model is not None and known_mean(trainer) is None:
        own = f"the loss of {type(inner_model(trainer.model)).__name__} is no mean that is known"
    return bool(own), f"{own}: {_DECLARE}" if own else ""


def holds_whole_model(trainer: "MemoryTrainer") -> bool:
    """True if each process holds the whole model."""
    from accelerate.utils import DistributedType

    replicated = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU)
    return not trainer.is_distributed_loading_by_transformers and trainer.accelerator.distributed_type in replicated


def changes_weights_in_backward(trainer: "MemoryTrainer") -> bool:
    """True if backward updates weights, so that a failure in it leaves some updated and some not."""
    optim = getattr(trainer.args.optim, "value", trainer.args.optim)
    return trainer.memory_args.optimizer_in_backward or optim in STEPS_IN_BACKWARD


def _why_not_repeated(trainer: "MemoryTrainer", kind: type | None) -> str:
    if not trainer.memory_args.oom_recovery:
        return "oom_recovery is off"
    if not holds_whole_model(trainer):  # processes wait for each other within every layer
        return f"{trainer.accelerator.distributed_type.value} cannot repeat a step"
    if changes_weights_in_backward(trainer):
        name = "optimizer_in_backward" if trainer.memory_args.optimizer_in_backward else trainer.args.optim.value
        return f"{name} cannot repeat a step"
    if trainer.args.n_gpu > 1:
        return "DataParallel cannot repeat a step: start a process per GPU"
    if kind is not None and kind.__name__ not in _TRL_LAYOUTS:
        return f"{kind.__name__} generates, keeps state or mixes means within a step, which cannot run again in chunks"
    if kind is not None and trainer.args.world_size > 1 and not gathers_metrics_alone(kind):
        return (
            f"the loss of {kind.__name__} gathers over processes in every forward pass, so that all must run as many"
        )
    if kind is not None and trainer.args.activation_offloading:
        return "activation_offloading of TRL keeps what a failed forward pass left"
    modules = trainer.model.named_modules() if trainer.model is not None else ()
    name = next((name for name, module in modules if isinstance(module, _BATCH_NORM)), None)
    return f"{name} normalizes over the whole batch and counts every pass" if name is not None else ""


def _why_not_split(trainer: "MemoryTrainer", kind: type | None) -> str:
    config = getattr(trainer.model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    balances = getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 0)
    if balances or (kind is not None and getattr(trainer, "aux_loss_enabled", False)):
        return "the router's auxiliary loss is a mean over the whole batch"
    if kind is not None and (mixing := _ACROSS_PAIRS & set(getattr(trainer, "loss_types", ()))):
        return f"loss_type={min(mixing)} compares the samples of a batch with each other"
    return ""
