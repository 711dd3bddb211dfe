"""What runs on which card: python benchmarks/cards.py

Every model in full, with LoRA and with QLoRA at the settings that take least on one device, and what a card offers.
Predicted, nothing here is measured. The README's table is made from the result.
"""

import time

from record import record

from hf_memopt import MemoryArguments, estimate, get_hardware, get_preset
from hf_memopt.errors import InputError

CARDS = [
    "rtx_3070",
    "rtx_3060",
    "rtx_4080",
    "rtx_4090",
    "rx_7900_xtx",
    "l40s",
    "a100_80gb",
    "h200",
    "mi300x",
    "apple_m2_8gb",
    "apple_m2_16gb",
    "apple_m4_max_64gb",
]
MODELS = ["llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b"]
TOKENS = 2048
SMALLEST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 16,
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
}


def estimated(kind: str, preset_name: str, model: str, method: str) -> dict:
    """A row: the smallest settings of a method on a kind of device."""
    row = {"kind": kind, "model": model, "method": method, "tokens": TOKENS}
    preset = get_preset(preset_name, method=method)
    fields = SMALLEST | ({} if kind == "mps" else {"optim": "adamw_8bit"})
    fields |= {"bf16": preset.precision == "bf16", "fp16": preset.precision == "fp16"}
    began = time.perf_counter()
    try:
        found = estimate(
            model,
            fields,
            TOKENS,
            preset.hardware,
            peft_config=preset.peft_config(),
            dtype="bfloat16" if method == "full" else preset.dtype,
            quantization_config=preset.model_kwargs().get("quantization_config"),
            memory_args=MemoryArguments(loss_chunk_size=512),
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
    for kind, preset in (("gpu", "a100_80gb"), ("mps", "apple_m4_max_64gb")):
        for model in MODELS:
            for method in ("full", "lora") if kind == "mps" else ("full", "lora", "qlora"):
                rows.append(estimated(kind, preset, model, method))
                print(rows[-1], flush=True)
    for name in CARDS:
        card = get_hardware(name)
        rows.append(
            {
                "card": name,
                "label": card.label,
                "kind": "mps" if card.backend == "mps" else "gpu",
                "capacity_bytes": card.memory,
            }
        )
    record("cards", "python benchmarks/cards.py", rows)


if __name__ == "__main__":
    main()
