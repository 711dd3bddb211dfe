"""The estimator against PEFT's own comparison of its methods on an L40S: python benchmarks/estimator_peft.py

data/published_peaks_peft.json holds 34 rows of huggingface/peft's method_comparison/MetaMathQA: its source, the
adapter's configuration and the reserved memory that PEFT measured. Their batches have many lengths, and the longest
was not published: it is fitted on the plain LoRA row of rank 32, one integer, and used for all other rows.

PEFT's loop (its run.py) is not the Trainer: it leaves the model's KV cache on, and holds the outputs, logits and cache
among them, until the next batch has its own. The rows were measured with a peft before 0.20. Both are repeated here.
"""

import inspect
import json
import time
from importlib import metadata
from pathlib import Path
from unittest import mock

from estimator_published import config_of
from record import record
from rich.progress import track

DATA = Path(__file__).parent / "data" / "published_peaks_peft.json"
FITTED_ON = "peft-mmqa-lora-llama-3.2-3B-rank32"
LENGTHS = range(600, 769)  # PEFT's max_seq_length is 768


def adapter_of(row: dict):
    """The row's adapter; None for full fine-tuning. Fields that this version of peft does not have are left out."""
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    settings = dict(row["adapter_config"] or {})
    if not settings:
        return None
    kind = PEFT_TYPE_TO_CONFIG_MAPPING[settings.pop("peft_type")]
    known = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in settings.items() if name in known and value is not None})


def as_measured(add_adapters):
    """Adapters as PEFT's loop had them.

    It adds them to a model that is on the GPU already, and peft leaves BOFT's permutations in host memory; each
    forward copies them. (Trainer moves them to the GPU with the model.) AdaLoRA's `ranknum`, which divides a layer's
    output, was not trained: published `trainable_params` are without it. peft 0.21 trains it, and saves that output
    for backward.
    """
    import torch

    def add(model, config, *how):
        model = add_adapters(model, config, *how)
        for module in model.modules():
            if hasattr(module, "boft_P"):
                module.boft_P = torch.empty(1).expand(module.boft_P.shape)  # no bytes of its own; its copies have them
            if hasattr(module, "ranknum"):
                module.ranknum.requires_grad_(False)
        return model

    return add


def hold_outputs(compute_loss):
    """`outputs = model(**batch)` in PEFT's loop lives through backward and the optimizer's step."""

    def compute(trainer, model, inputs, return_outputs=False, num_items_in_batch=None):
        trainer.held = None
        loss, trainer.held = compute_loss(trainer, model, inputs, True, num_items_in_batch)
        return (loss, trainer.held) if return_outputs else loss

    return compute


def reserved(row: dict, seq_len: int) -> int:
    """Predicted bytes that CUDA's caching allocator reserves, without expandable segments."""
    from transformers import Trainer

    from hf_memopt.estimator import estimate
    from hf_memopt.estimator.tracing import model

    fields = {"per_device_train_batch_size": row["micro_batch"], "optim": "adamw_torch", "max_grad_norm": 1.0}
    fields["use_cache"] = True
    with (
        mock.patch.object(model, "add_adapters", as_measured(model.add_adapters)),
        mock.patch.object(Trainer, "compute_loss", hold_outputs(Trainer.compute_loss)),
    ):
        estimated = estimate(config_of(row), fields, seq_len, "l40s", adapter_of(row), "bfloat16", padded=True)
    return estimated.reserved_bytes["segments"]


def fitted_length(row: dict) -> int:
    """The length whose prediction is nearest to the row's measured peak; predictions grow with length."""
    low, high = LENGTHS.start, LENGTHS.stop - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if reserved(row, middle) < row["peak_bytes"] else (low, middle)
    return min((low, high), key=lambda length: abs(reserved(row, length) - row["peak_bytes"]))


def again(row: dict) -> dict:
    """What is predicted now, for the length that was fitted then."""
    published = next(one for one in json.loads(DATA.read_text()) if one["id"] == row["id"])
    return {"predicted_bytes": reserved(published, row["seq_len"])}


def main() -> None:
    data = json.loads(DATA.read_text())
    seq_len = fitted_length(next(row for row in data if row["id"] == FITTED_ON))
    versions = {"peft": metadata.version("peft")}
    rows = []
    for row in track(data, description="PEFT's rows"):
        started = time.perf_counter()
        predicted = reserved(row, seq_len)
        name = row["id"].removeprefix("peft-mmqa-").replace("-llama-3.2-3B", "")
        rows.append(
            {
                "id": row["id"],
                "source": row["source"],
                "name": name,
                "peft_type": (row["adapter_config"] or {}).get("peft_type", "full fine-tuning"),
                "measured_bytes": row["peak_bytes"],
                "predicted_bytes": predicted,
                "error": round(predicted / row["peak_bytes"] - 1, 5),
                "fitted": row["id"] == FITTED_ON,
                "seq_len": seq_len,
                "tokens_per_second": row["also"]["train_tokens_per_second"],
                "seconds": round(time.perf_counter() - started, 1),
                "versions": versions,
                "published_versions": row["versions"],
            }
        )
    for row in sorted(rows, key=lambda row: row["error"]):
        print(f"{row['error']:+8.2%}  {row['name']}{' (fitted)' if row['fitted'] else ''}, {row['seconds']} s")
    record("estimator_peft", rows)


if __name__ == "__main__":
    main()
