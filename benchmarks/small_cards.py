"""Mixtures of experts on cards of 12, 16 and 24 GB: python benchmarks/small_cards.py

Plans of QLoRA with samples of 1,024 tokens, on a desktop that has 48 GiB of host memory for training; nothing was
measured on a GPU. gpt-oss-20b is a copy in bfloat16: its own checkpoint is in MXFP4, which has another 4 bits.
"""

import copy

from record import kept, record_each

from hf_memopt.estimator.architectures import load_config
from hf_memopt.planner.plan import plan

MODELS = ("gpt-oss-20b", "qwen3-30b-a3b", "mixtral-8x7b")
CARDS = ("rtx_3060", "rtx_4080", "rtx_4090")
HOST_GIB = 48
# What others state of the same models, on whatever settings of theirs.
STATED = {
    "gpt-oss-20b": "14 GB (unsloth's blog, 2025-08-08)",
    "qwen3-30b-a3b": "about 7 GB with streamed experts, 17 to 24 without (axolotl #3787, RTX A2000)",
}


def settings_of(model: str, card: str) -> dict:
    """The usual settings of a plan; none where nothing fits."""
    config = copy.deepcopy(load_config(model))
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    found = plan(config, card, method="qlora", seq_len=1024, host_memory=HOST_GIB * 2**30)
    if not found.profiles:
        return {"settings": None, "missing_bytes": found.missing_bytes}
    usual = found.usual
    figures = kept(usual.estimate, "device_bytes", "host_bytes", "tokens_per_second")
    return {"settings": usual.summary, "quantized_experts": usual.memory_args.quantized_experts, **figures}


def compared(model: str, card: str) -> dict:
    """A row: a model on a card."""
    return {"model": model, "card": card, "stated": STATED.get(model), **settings_of(model, card)}


def again(row: dict) -> dict:
    """What is planned now."""
    return settings_of(row["model"], row["card"])


if __name__ == "__main__":
    record_each("small_cards", compared, [(model, card) for model in MODELS for card in CARDS])
