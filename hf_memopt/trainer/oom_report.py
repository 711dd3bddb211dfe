"""What is said, and kept in oom_report.json, when a run ends for lack of memory."""

import logging
from typing import Any

from hf_memopt.errors import InputError, one_line
from hf_memopt.oom.causes import figures_of, reason
from hf_memopt.oom.classify import Diagnosis
from hf_memopt.redaction import redact
from hf_memopt.trainer.optimizer_guard import torch_optimizer
from hf_memopt.trainer.split import tensor_shapes

logger = logging.getLogger(__name__)


def describe_failure(trainer, stage: str, found: Diagnosis, shapes, indices, why: str) -> dict[str, Any]:
    """Diagnosis, batch, what memory holds, and what to change, as JSON has it."""
    growth = trainer._callback.growth
    why_at_all, _ = reason(
        found,
        stage,
        trainer.state.global_step,
        figures_of(found.message),
        growth and growth.label(),
        trainer._pressure.is_largest(shapes),
    )
    predicted, changes = outlook(trainer)
    report = {
        "event": "out_of_memory",
        "step": trainer.state.global_step,
        "stage": stage,
        "kind": str(found.kind),
        "cause": found.cause,
        "reason": why_at_all,
        "message": found.message,
        "why_not_smaller": why or "the micro-batch is one sample",
        "shapes": shapes,
        "dataset_indices": indices,
        "held_bytes": held_bytes(trainer),
        "predicted_breakdown": predicted,
        "next": changes,
        "checkpoint": None,
    }
    return redact(report)


def held_bytes(trainer) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states that this process holds now."""
    import torch

    def size(tensors) -> int:
        return sum(part.numel() * part.element_size() for part in tensors if isinstance(part, torch.Tensor))

    weights = list(trainer.model.parameters())
    optimizer = torch_optimizer(trainer)
    states = [] if optimizer is None else [part for state in optimizer.state.values() for part in state.values()]
    return {
        "parameters": size(weights),
        "gradients": size(weight.grad for weight in weights),
        "optimizer_states": size(states),
    }


def outlook(trainer) -> tuple[dict[str, int] | None, list[dict[str, Any]]]:
    """What one sample alone is predicted to take at the peak, by kind, and up to three changes that save most.

    Each change is a dict with `change` and `saved_bytes`. Where no estimate can be made (there may be no memory left
    to make it in) there is no breakdown and no figure, but what usually helps.
    """
    unpredicted = [{"change": change, "saved_bytes": None} for change in _usual(trainer.args)][:3]
    try:
        breakdown, changes = _predicted(trainer)
    except Exception as error:  # whatever it is, it must not cost the report of the failure that is being explained
        reason = f"{type(error).__name__}: {one_line(error)}"[:200]
        logger.warning("no estimate of what one sample takes, so the changes are the usual ones (%s)", reason)
        logger.debug("the estimate failed here", exc_info=True)
        return None, unpredicted
    return breakdown, changes or unpredicted


def _predicted(trainer) -> tuple[dict[str, int], list[dict[str, Any]]]:
    import copy

    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.job import describe
    from hf_memopt.estimator.suggestions import largest_savings
    from hf_memopt.estimator.training_fields import read_trainer_fields

    config = copy.deepcopy(trainer.model.config)
    quantization = config.__dict__.pop("quantization_config", None)
    peft = getattr(trainer.model, "peft_config", {}).get("default")
    micro = trainer._runner.running[0]
    shapes = tensor_shapes(micro.inputs).values() if micro is not None else ()
    length = max((shape[1] for shape in shapes if len(shape) > 1), default=0)
    if not length:
        raise InputError("the batch has no tokens")
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    fields = read_trainer_fields(trainer) | {"per_device_train_batch_size": 1}  # smaller it cannot be
    job = describe(
        config,
        fields,
        length,
        peft_config=peft,
        dtype=dtype,
        quantization_config=quantization,
        memory_args=trainer.memory_args,
    )
    found = estimate_job(job)
    savings = largest_savings(job, found)
    changes = [{"change": saving.change, "saved_bytes": saving.saved_bytes} for saving in savings]
    return found.breakdown, changes


def _usual(args) -> list[str]:
    """What helps most jobs of which not even one sample fits, most effective first."""
    changes = [] if args.activation_checkpointing else ["activation_checkpointing=true"]
    changes += [] if "8bit" in str(args.optim) else ["optim=adamw_8bit"]
    return [
        *changes,
        "shorter samples (max_length)",
        "LoRA or QLoRA instead of training all weights",
        "a smaller model",
    ]
