"""What TRL's trainers take for a 7B model: python benchmarks/trl_trainers.py

Predicted, nothing here is measured. docs/trl.md's table is made from the result.
"""

from cards import predicted
from record import record

from hf_memopt import get_hardware, get_preset

MODEL = "qwen2.5-7b"
CARDS = ("rtx_4090", "a100_80gb")
# Task, method, samples a micro-batch, tokens a sequence, further fields of TRL's configuration.
JOBS = [
    ("sft", "qlora", 2, 2048, {}),
    ("sft", "lora", 2, 2048, {}),
    ("sft", "full", 2, 2048, {"optim": "adamw_8bit"}),
    ("dpo", "qlora", 1, 1024, {}),
    ("dpo", "qlora", 1, 1024, {"activation_checkpointing": False}),
    ("dpo", "qlora", 4, 1024, {}),
    ("dpo", "qlora", 1, 4096, {}),
    ("dpo", "lora", 1, 1024, {}),
    ("dpo", "full", 1, 1024, {}),
    ("dpo", "full", 1, 1024, {"precompute_ref_log_probs": True}),
    ("dpo", "full", 1, 1024, {"optim": "adamw_8bit"}),
    ("dpo", "full", 1, 1024, {"optim": "adamw_8bit", "precompute_ref_log_probs": True}),
    ("kto", "qlora", 2, 1024, {}),
    ("kto", "full", 2, 1024, {"optim": "adamw_8bit", "precompute_ref_log_probs": True}),
    ("reward", "qlora", 1, 1024, {}),
    ("reward", "lora", 1, 1024, {}),
]


def main() -> None:
    rows = []
    for task, method, samples, tokens, fields in JOBS:
        row = {"model": MODEL, "task": task, "method": method, "samples": samples, "tokens": tokens, "fields": fields}
        fields = {"per_device_train_batch_size": samples, **fields}  # with TRL's defaults for the rest
        preset = get_preset("a100_80gb", method=method)
        rows.append(row | predicted(preset, MODEL, fields, tokens, "a100_80gb", dtype="bfloat16", task=task))
        print(rows[-1], flush=True)
    cards = [{"card": name, "capacity_bytes": get_hardware(name).memory} for name in CARDS]
    record("trl", rows + cards, "python benchmarks/trl_trainers.py")


if __name__ == "__main__":
    main()
