"""What is said, and kept in oom_report.json, when a run ends for lack of memory."""

from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.hardware.catalog import gib
from hf_memopt.training.guarded_optimizer import torch_optimizer
from hf_memopt.training.oom import Diagnosis
from hf_memopt.training.pieces import shapes_of


def oom_report(trainer, stage: str, found: Diagnosis, shapes, indices, why: str) -> dict[str, Any]:
    """Diagnosis, batch, what memory holds, and what to change, as JSON has it."""
    predicted, changes = outlook(trainer)
    return {
        "event": "out_of_memory",
        "step": trainer.state.global_step,
        "stage": stage,
        "kind": str(found.kind),
        "cause": found.cause,
        "message": found.message,
        "why_not_smaller": why or "the micro-batch is one sample",
        "shapes": shapes,
        "dataset_indices": indices,
        "held_bytes": held_bytes(trainer),
        "predicted_breakdown": predicted,
        "next": changes,
        "checkpoint": None,
    }


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
    to make it in) there is no breakdown and no figure.
    """
    try:
        return _predicted(trainer)
    except (Exception, MemoryError):
        return None, [{"change": change, "saved_bytes": None} for change in _usual(trainer.args)][:3]


def _predicted(trainer) -> tuple[dict[str, int], list[dict[str, Any]]]:
    import copy

    from hf_memopt.estimator.prediction import describe, estimate_job, fields_of_trainer
    from hf_memopt.estimator.savings import largest_savings

    config = copy.deepcopy(trainer.model.config)
    quantization = config.__dict__.pop("quantization_config", None)
    peft = getattr(trainer.model, "peft_config", {}).get("default")
    micro = trainer._running[0]
    shapes = shapes_of(micro.inputs).values() if micro is not None else ()
    length = max((shape[1] for shape in shapes if len(shape) > 1), default=0)
    if not length:
        raise InputError("the batch has no tokens")
    dtype = str(next(trainer.model.parameters()).dtype).removeprefix("torch.")
    fields = fields_of_trainer(trainer) | {"per_device_train_batch_size": 1}  # smaller it cannot be
    job = describe(config, fields, length, "auto", peft, dtype, quantization_config=quantization,
                   memory_args=trainer.memory_args)  # fmt: skip
    found = estimate_job(job)
    savings = largest_savings(job, found)
    changes = [{"change": saving.change, "saved_bytes": saving.saved_bytes} for saving in savings]
    return found.breakdown, changes or [{"change": change, "saved_bytes": None} for change in _usual(trainer.args)][:3]


def _usual(args) -> list[str]:
    """What helps most jobs, most effective first."""
    changes = [] if args.activation_checkpointing else ["activation_checkpointing=true"]
    changes += [] if "8bit" in str(args.optim) else ["optim=adamw_8bit"]
    return [
        *changes,
        "shorter samples (max_length)",
        "LoRA or QLoRA instead of training all weights",
        "a smaller model",
    ]


def told(event: dict[str, Any]) -> str:
    """An event in one sentence, the end of a run in a paragraph."""
    if event["event"] == "out_of_memory":
        return _end(event)
    between = event.get("stage") in ("eval", "save", "resume")
    where = f"after step {event['step']}" if between else f"step {event['step'] + 1}"
    if event["event"] == "oom_recovered":
        text = f"{where}: out of memory in {event['stage']}, recovered"
        if "micro_batch_after" in event:
            text += f": {event['micro_batch_before']} → {event['micro_batch_after']} samples at once"
        if event.get("remedy"):
            text += f": {event['remedy']}"
        if event.get("shapes"):
            text += f"; the batch: {_brief(event['shapes'])}"
        if event.get("dataset_indices"):
            text += f", samples {_first(event['dataset_indices'])}"
        return f"{text} ({event['message'][:200]})"
    if event["event"] == "worst_batch_fits":
        text = f"before {where}: the largest batch fits, {event['samples_at_once']} samples at once"
        return f"{text}: {_brief(event['shapes'])}, samples {_first(event['dataset_indices'])}"
    if event["event"] == "micro_batch_lowered":
        share, before, after = event["utilization"], event["micro_batch_before"], event["micro_batch_after"]
        return f"{where}: memory {event['status']} at {share:.0%}: {before} → {after} samples at once"
    details = ", ".join(f"{name}={value}" for name, value in event.items() if name not in ("event", "step", "process"))
    return f"{where}: {event['event'].replace('_', ' ')}: {details}"


def _first(indices: list[int] | None) -> str:
    """Up to eight of them; all are in the event."""
    if indices is None:
        return "unknown"
    return ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")


def _brief(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {'×'.join(map(str, shape))}" for name, shape in list(shapes.items())[:3])


def _end(report: dict[str, Any]) -> str:
    held = ", ".join(f"{name.replace('_', ' ')} {gib(size)}" for name, size in report["held_bytes"].items())
    lines = [
        f"out of memory in {report['stage']} of step {report['step'] + 1}, and {report['why_not_smaller']}: "
        f"{report['cause']} ({report['message'][:300]})",
        f"  the batch: {_brief(report['shapes'])}, samples {_first(report['dataset_indices'])}",
        f"  held: {held}",
    ]
    if report["predicted_breakdown"]:
        parts = report["predicted_breakdown"].items()
        told = ", ".join(f"{kind.replace('_', ' ')} {gib(size)}" for kind, size in parts if size)
        lines.append(f"  predicted for one sample: {told}")
    for change in report["next"]:
        saved = f", predicted to save {gib(change['saved_bytes'])}" if change["saved_bytes"] else ""
        lines.append(f"  try: {change['change']}{saved}")
    if report["checkpoint"]:
        lines.append(f"  saved: {report['checkpoint']}; starting again goes on from there")
    return "\n".join(lines)
