"""Every `optim` of TrainingArguments, and the levers that are optimizers: python benchmarks/optimizers.py

The embedded pretraining job, 60 steps, at two learning rates each, of which the better counts. State bytes are those
of the tensors that the optimizer keeps; the step time is compared with adamw_torch_fused's, taking turns with it.
Some need a package of their own: torchao, galore-torch, apollo-torch, lomo-optim, grokadamw, schedulefree,
torch-optimi. A row says so where one is missing.
"""

import statistics
import sys

import torch
from embedded_run import train
from record import record
from transformers.training_args import OptimizerNames

USUAL = "adamw_torch_fused"
PROJECTED = {"optim_target_modules": ["attn", "mlp"]}
# What is not Adam at a rate of 3e-3.
RATES = {"lion": 3e-4, "sgd": 0.5, "rmsprop": 1e-3, "adagrad": 1e-2, "lomo": 0.3, "adalomo": 3e-3}
RATES |= {"schedule_free_sgd": 1.0, "galore": 1e-2, "apollo": 1e-2}
LEVERS = {"adam_mini": {"adam_mini": True}, "optimizer_in_backward": {"optimizer_in_backward": True}}


def rate_of(name: str) -> float:
    bare = name.removeprefix("paged_")
    known = [rate for family, rate in RATES.items() if bare == family or bare.startswith(f"{family}_")]
    return known[0] if known else 3e-3


def fields_of(name: str, rate: float) -> dict:
    fields = {"optim": USUAL if name in LEVERS else name, "learning_rate": rate}
    if name.startswith(("galore", "apollo")):
        fields |= {**PROJECTED, "optim_args": "rank=64"}
    if "schedule_free" in name:
        fields |= {"lr_scheduler_type": "constant"}
    if name == "optimizer_in_backward" or "lomo" in name:
        fields |= {"max_grad_norm": 0.0}
    return fields


def state_bytes(trainer) -> int:
    """Of the tensors that the optimizer keeps, without its weights."""

    def size(value) -> int:
        if isinstance(value, torch.Tensor):
            inner = getattr(value, "__tensor_flatten__", None)
            if inner is not None:  # torchao's quantized states are made of several tensors
                return sum(size(getattr(value, name)) for name in inner()[0])
            return value.numel() * value.element_size()
        if isinstance(value, dict):
            return sum(map(size, value.values()))
        return sum(map(size, vars(value).values())) if hasattr(value, "__dict__") else 0  # a projection, say

    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    layerwise = getattr(optimizer, "optimizer_dict", None)
    kept = sum(size(one.state) for one in (layerwise.values() if layerwise else [optimizer]))
    return kept + sum(size(group.get("state", {})) for group in optimizer.param_groups)  # where grokadamw has them


def row_of(name: str) -> dict:
    found = None
    for share in (1.0, 0.3):
        rate = rate_of(name) * share
        try:
            trainer, loss, _ = train(fields_of(name, rate), LEVERS.get(name))
        except BaseException as error:  # whatever an optimizer's package raises, this table is to show
            if isinstance(error, KeyboardInterrupt):
                raise
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            return {"optim": name, "works": False, "why": why}
        if found is None or loss < found["held_out_loss"]:
            weights = sum(weight.numel() for weight in trainer.model.parameters())
            found = {"optim": name, "works": True, "learning_rate": rate, "held_out_loss": round(loss, 3)}
            found["state_bytes_per_weight"] = round(state_bytes(trainer) / weights, 2)
    pairs = [
        (train(fields_of(name, rate), LEVERS.get(name), 6)[2], train(fields_of(USUAL, 3e-3), None, 6)[2])
        for _ in range(3)
    ]
    ratios = [statistics.median(ours[2:]) / statistics.median(usual[2:]) for ours, usual in pairs]
    return {**found, "step_time_ratio": round(statistics.median(ratios), 2)}


def main(names: list[str]) -> None:
    elsewhere = ("adamw_torch_xla", "adamw_torch_npu_fused", "adamw_anyprecision")
    names = names or [USUAL, *LEVERS, *(one.value for one in OptimizerNames if one.value not in (USUAL, *elsewhere))]
    rows = []
    for name in names:
        rows.append(row_of(name))
        print(rows[-1], flush=True)
    why = "for other devices, or of a package that is gone"
    rows += [{"optim": name, "works": False, "why": why} for name in elsewhere]
    record("optimizers", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
