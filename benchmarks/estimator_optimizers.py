"""Every `optim`, predicted and measured on a CPU: python benchmarks/estimator_optimizers.py [NAME …]

Two steps of a small Llama whose peak is the optimizer's, with fp32 weights, or the backward pass's for optimizers
that step there. States are the storages that the optimizer keeps after them: a GaLore projection of fp32 gradients is
a view of all singular vectors, which stay. Packages of their own, as many as are installed: torchao, galore-torch,
apollo-torch, lomo-optim, grokadamw, schedulefree, torch-optimi.
"""

import sys
import tempfile

import torch
from jobs import make_trainer, same_rows
from record import record_each
from transformers.training_args import OptimizerNames

LENGTH = 16


PROJECTED = {"optim_target_modules": ["attn", "mlp"], "optim_args": "rank=64,update_proj_gap=1"}


def config():
    from transformers import LlamaConfig

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    return LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0)


def fields(name: str) -> dict:
    chosen = {"optim": name, "learning_rate": 1e-4, "per_device_train_batch_size": 1}
    if name.startswith(("galore", "apollo")):  # a later step projects again, beside all states: here the second
        chosen |= PROJECTED
    if "schedule_free" in name:
        chosen["lr_scheduler_type"] = "constant"
    if "lomo" in name:
        chosen["max_grad_norm"] = 0.0
    return chosen


def storages(held, seen: dict) -> dict:
    """Storage -> bytes of all tensors in nested states."""
    if isinstance(held, torch.Tensor):
        if hasattr(held, "__tensor_flatten__"):
            storages([getattr(held, part) for part in held.__tensor_flatten__()[0]], seen)
        else:
            storage = held.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    elif isinstance(held, dict):
        storages(list(held.values()), seen)
    elif isinstance(held, list):
        for part in held:
            storages(part, seen)
    elif hasattr(held, "ortho_matrix"):
        storages(held.ortho_matrix, seen)
    return seen


def state_bytes(optimizer) -> int:
    layerwise = getattr(optimizer, "optimizer_dict", None)
    kept: dict = {}
    for each in layerwise.values() if layerwise else [optimizer]:
        storages([dict(each.state), *(group.get("state", {}) for group in each.param_groups)], kept)
    return sum(kept.values())


def measured(name: str) -> tuple[int, int]:
    """The allocator's peak of two real steps, and the bytes of the states after them."""
    from profiled_peak import allocator_peak
    from transformers import AutoModelForCausalLM

    # RAdam without a schedule is SGD for five steps.
    chosen = {**fields(name), "max_steps": 8 if name == "schedule_free_radam" else 2}
    trainers = []

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = AutoModelForCausalLM.from_config(config(), dtype=torch.float32)
            trainers.append(make_trainer(folder, model, chosen, same_rows(LENGTH, 16)))
            trainers[0].train()

    peak = allocator_peak(train)
    return peak, state_bytes(trainers[0].optimizer.optimizer)


def again(row: dict) -> dict:
    """What is predicted now."""
    from hf_memopt import InputError, estimate

    try:
        estimated = estimate(config(), fields(row["optim"]), LENGTH, "cpu")
    except InputError as error:
        return {"refused": str(error)}
    return {
        "traced_bytes": estimated.peak_allocated_bytes,
        "state_bytes": estimated.breakdown["optimizer_states"],
    }


def row_of(name: str) -> dict:
    row: dict = {"optim": name}
    row |= again(row)
    if "refused" in row:
        return row
    try:
        row["measured_bytes"], row["measured_state_bytes"] = measured(name)
    except Exception as error:  # whatever a package raises, the table is to show
        return {**row, "unmeasured": f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"}
    row["traced_error"] = round(row["traced_bytes"] / row["measured_bytes"] - 1, 5)
    return row


if __name__ == "__main__":
    names = sys.argv[1:] or [member.value for member in OptimizerNames]
    record_each("estimator_optimizers", row_of, ((name,) for name in names))
