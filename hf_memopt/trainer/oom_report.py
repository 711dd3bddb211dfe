"""oom_report.json: what failed, what memory held, and which changes would have saved most."""

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

from hf_memopt.errors import InputError, one_line
from hf_memopt.levers import changes
from hf_memopt.levers.facts import Facts
from hf_memopt.oom.causes import Failure, explain
from hf_memopt.oom.classify import Diagnosis
from hf_memopt.oom.figures import parse_figures
from hf_memopt.presets.trl_configs import trl_trainer
from hf_memopt.redaction import redact
from hf_memopt.trainer.combination import describe_setup
from hf_memopt.trainer.step.optimizer_guard import torch_optimizer
from hf_memopt.trainer.step.split import tensor_shapes

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

logger = logging.getLogger(__name__)


def describe_failure(trainer: "MemoryTrainer", stage: str, diagnosis: Diagnosis, micro, why: str) -> dict[str, Any]:
    """The content of oom_report.json, without secrets.

    Args:
        micro: the MicroBatch that failed; None where none was running.
        why: why no smaller micro-batch helps; "" where it is one sample.
    """
    shapes = tensor_shapes(micro.inputs) if micro is not None else {}
    growth = trainer._callback.growth
    cause, _ = explain(
        Failure(
            diagnosis=diagnosis,
            stage=stage,
            step=trainer.state.global_step,
            figures=parse_figures(diagnosis.message),
            grown=growth and growth.label(),
            longest=trainer._pressure.is_largest(shapes),
        )
    )
    predicted, proposed = predict_one_sample(trainer)
    report = {
        "event": "out_of_memory",
        "step": trainer.state.global_step,
        "stage": stage,
        "kind": str(diagnosis.kind),
        "cause": diagnosis.cause,
        "reason": cause,
        "message": diagnosis.message,
        "why_not_smaller": why or "the micro-batch is one sample",
        "shapes": shapes,
        "dataset_indices": trainer._dataset_indices(micro) if micro is not None else None,
        "held_bytes": count_held_bytes(trainer),
        "predicted_breakdown": predicted,
        "next": proposed,
        "checkpoint": None,
    }
    return redact(report)


def count_held_bytes(trainer: "MemoryTrainer") -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer states that this process holds now."""

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


def predict_one_sample(trainer: "MemoryTrainer") -> tuple[dict[str, int] | None, list[dict[str, Any]]]:
    """The predicted peak of a micro-batch of one sample, and up to three changes that would save most.

    Returns:
        Bytes by kind, and dicts of `change` and `saved_bytes`. Where no estimate can be made (there may be no memory
        left for it), None and what usually helps, with `saved_bytes` None.
    """
    setup = describe_setup(trainer.model, trainer.args)
    job = Facts(
        setup=setup,
        memory_args=trainer.memory_args,
        discrete_memory=Facts.on_device(setup.device).discrete_memory,
        next_token=trl_trainer(trainer) is None,  # TRL's head has chunks already
    )
    unpredicted = [{"change": change, "saved_bytes": None} for change in changes.advice(job, changes.USUAL)]
    try:
        breakdown, proposed = _predicted(trainer)
    except Exception as error:  # of any kind: the report of the out-of-memory failure matters more
        reason = f"{type(error).__name__}: {one_line(error)}"[:200]
        logger.warning("no estimate for one sample, so the report lists what usually helps (%s)", reason)
        logger.debug("traceback of the estimate", exc_info=True)
        return None, unpredicted
    return breakdown, proposed or unpredicted


def _predicted(trainer: "MemoryTrainer") -> tuple[dict[str, int], list[dict[str, Any]]]:
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.job import describe
    from hf_memopt.estimator.suggestions import largest_savings
    from hf_memopt.estimator.training_fields import read_trainer_fields

    if (kind := trl_trainer(trainer)) is not None:
        raise InputError(f"one sample of {kind.__name__} is not traced after a failure")
    config = copy.deepcopy(trainer.model.config)
    quantization = config.__dict__.pop("quantization_config", None)
    micro = trainer._runner.running[0]
    shapes = tensor_shapes(micro.inputs).values() if micro is not None else ()
    length = max((shape[1] for shape in shapes if len(shape) > 1), default=0)
    if not length:
        raise InputError("the batch has no tokens")
    fields = read_trainer_fields(trainer) | {"per_device_train_batch_size": 1}  # the smallest there is
    job = describe(
        config,
        fields,
        length,
        peft_config=getattr(trainer.model, "peft_config", {}).get("default"),
        dtype=str(next(trainer.model.parameters()).dtype).removeprefix("torch."),
        quantization_config=quantization,
        memory_args=trainer.memory_args,
    )
    estimate = estimate_job(job)
    savings = largest_savings(job, estimate)
    return estimate.breakdown, [{"change": saving.change, "saved_bytes": saving.saved_bytes} for saving in savings]
