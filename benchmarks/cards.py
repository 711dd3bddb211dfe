"""What runs on which card: python benchmarks/cards.py

Every model in full, with LoRA and with QLoRA at the settings that take least on one device, and what a card offers.
Predicted, nothing here is measured. The README's table is made from the result.
"""

import time

from jobs import CHECKPOINTED
from record import kept, record

from hf_memopt import MemoryArguments, estimate, get_hardware, get_preset
from hf_memopt.errors import InputError

CARDS = ("rtx_3070", "rtx_3060", "rtx_4080", "rtx_4090", "rx_7900_xtx", "l40s", "a100_80gb", "h200", "mi300x")
CARDS += ("apple_m2_8gb", "apple_m2_16gb", "apple_m4_max_64gb")
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-70b")
TOKENS = 2048
SMALLEST = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, **CHECKPOINTED}


def estimated(kind: str, preset_name: str, model: str, method: str) -> dict:
    """A row: the smallest settings of a method on a kind of device."""
    preset = get_preset(preset_name, method=method)
    fields = SMALLEST | ({} if kind == "mps" else {"optim": "adamw_8bit"})
    fields |= {"bf16": preset.precision == "bf16", "fp16": preset.precision == "fp16"}
    dtype = "bfloat16" if method == "full" else preset.dtype
    row = {"kind": kind, "model": model, "method": method, "tokens": TOKENS}
    chunked = MemoryArguments(loss_chunk_size=512)
    return row | predicted(preset, model, fields, TOKENS, preset.hardware, dtype=dtype, memory_args=chunked)


def predicted(preset, model: str, fields: dict, tokens: int, hardware, **more) -> dict:
    """What a row says of a model with a preset's adapters and quantization."""
    began = time.perf_counter()
    more |= {"peft_config": preset.peft_config()}
    more |= {"quantization_config": preset.model_kwargs().get("quantization_config")}
    try:
        found = estimate(model, fields, tokens, hardware, **more)
    except InputError as error:
        return {"refused": str(error)}
    sizes = kept(found, "device_bytes", "peak_allocated_bytes", "breakdown", "phase")
    return sizes | {"seconds": round(time.perf_counter() - began, 1)}


def main() -> None:
    rows = []
    for kind, preset in (("gpu", "a100_80gb"), ("mps", "apple_m4_max_64gb")):
        for model in MODELS:
            for method in ("full", "lora") if kind == "mps" else ("full", "lora", "qlora"):
                rows.append(estimated(kind, preset, model, method))
                print(rows[-1], flush=True)
    for name in CARDS:
        card = get_hardware(name)
        kind = "mps" if card.backend == "mps" else "gpu"
        rows.append({"card": name, "label": card.label, "kind": kind, "capacity_bytes": card.memory})
    record("cards", rows)


if __name__ == "__main__":
    main()
