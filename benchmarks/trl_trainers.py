"""What TRL's trainers take for a 7B model: python benchmarks/trl_trainers.py

Predicted, nothing here is measured. docs/trl.md's table is made from the result.
"""

import time

from record import record

from hf_memopt import estimate, get_hardware, get_preset
from hf_memopt.errors import InputError

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


def predicted(task: str, method: str, samples: int, tokens: int, fields: dict) -> dict:
    """A row: one job, with TRL's defaults where `fields` say nothing."""
    row = {"model": MODEL, "task": task, "method": method, "samples": samples, "tokens": tokens, "fields": fields}
    preset = get_preset("a100_80gb", method=method)
    began = time.perf_counter()
    try:
        found = estimate(
            MODEL,
            {"per_device_train_batch_size": samples, **fields},
            tokens,
            "a100_80gb",
            peft_config=preset.peft_config(),
            dtype="bfloat16",
            quantization_config=preset.model_kwargs().get("quantization_config"),
            task=task,
        )
    except InputError as error:
        return row | {"refused": str(error)}
    return row | {
        "device_bytes": found.device_bytes,
        "peak_allocated_bytes": found.peak_allocated_bytes,
        "breakdown": found.breakdown,
        "phase": found.phase,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    rows = []
    for job in JOBS:
        rows.append(predicted(*job))
        print(rows[-1], flush=True)
    cards = [{"card": name, "capacity_bytes": get_hardware(name).memory} for name in CARDS]
    record("trl", "python benchmarks/trl_trainers.py", rows + cards)


if __name__ == "__main__":
    main()
