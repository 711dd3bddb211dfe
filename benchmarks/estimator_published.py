"""The estimator against published measurements on GPUs: python benchmarks/estimator_published.py

data/published_peaks.json holds the rows that the estimator's present scope covers (one device; full or LoRA; causal
language models), each with its source: peaks of `torch.cuda.max_memory_allocated` that others measured and published.
Nothing here was measured by this project.
"""

import json
import statistics
from pathlib import Path

from record import record
from rich.progress import track

DATA = Path(__file__).parent / "data" / "published_peaks.json"
FAMILIES = {"bigcode/gpt_bigcode-santacoder": "gpt_bigcode", "mistralai/Mistral-7B-v0.1": "mistral",
            "ibm/PowerLM-3b": "granite"}  # fmt: skip


def config_of(row: dict):
    from transformers import AutoConfig

    arch = row["arch"]
    if row["model"].startswith("bigcode"):
        return AutoConfig.for_model(
            "gpt_bigcode", n_embd=arch["hidden"], n_layer=arch["layers"], n_head=arch["heads"], multi_query=True,
            n_inner=arch["intermediate"], vocab_size=arch["vocab"], n_positions=arch["max_pos"],
        )  # fmt: skip
    return AutoConfig.for_model(
        FAMILIES[row["model"]], hidden_size=arch["hidden"], num_hidden_layers=arch["layers"],
        num_attention_heads=arch["heads"], num_key_value_heads=arch["kv_heads"], vocab_size=arch["vocab"],
        intermediate_size=arch["intermediate"], tie_word_embeddings=arch["tied"], max_position_embeddings=32768,
    )  # fmt: skip


def predicted(row: dict) -> int:
    from peft import LoraConfig

    from hf_memopt.estimator import estimate

    lora = row["lora"]
    if lora:
        lora = LoraConfig(r=lora["r"], lora_alpha=lora["alpha"], lora_dropout=lora["dropout"], task_type="CAUSAL_LM",
                          target_modules=lora["targets"])  # fmt: skip
    fields = {
        "per_device_train_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row["grad_accum"],
        "activation_checkpointing": row["grad_checkpointing"],
        "activation_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch",
    }
    device = row["gpu"].lower().replace("-", "_")
    return estimate(config_of(row), fields, row["seq_len"], device, lora, "bfloat16").peak_allocated_bytes


def main() -> None:
    rows = []
    for row in track(json.loads(DATA.read_text()), description="published rows"):
        found = predicted(row)
        error = found / row["peak_bytes"] - 1
        told = {name: row[name] for name in ("id", "model", "method", "micro_batch", "source")}
        rows.append({**told, "predicted_bytes": found, "published_bytes": row["peak_bytes"], "error": round(error, 5)})
    for row in rows:
        print(
            f"{row['error']:+8.2%}  {row['model']}, {row['method']}, micro-batch {row['micro_batch']}: "
            f"{row['predicted_bytes'] / 1e9:.2f} predicted, {row['published_bytes'] / 1e9:.2f} GB published"
        )
    errors = [abs(row["error"]) for row in rows]
    print(f"{len(rows)} rows: median |error| {statistics.median(errors):.2%}, largest {max(errors):.2%}")
    record("estimator_published", "python benchmarks/estimator_published.py", rows)


if __name__ == "__main__":
    main()
