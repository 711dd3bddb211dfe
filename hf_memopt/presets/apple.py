"""Apple Silicon. Memory is shared with macOS and every other program."""

from hf_memopt.presets.base import (
    QWEN_0_6B,
    QWEN_1_7B,
    QWEN_4B,
    QWEN_8B,
    SMOLLM_135M,
    SMOLLM_360M,
    single,
)
from hf_memopt.presets.preset import Preset


def apple_m2_8gb(method: str) -> Preset:
    """M2 with 8 GB. Full: SmolLM2-135M at 512 tokens; LoRA: Qwen3-0.6B; QLoRA: Qwen3-1.7B.

    As with 16 GB, but for a full micro-batch of 2: macOS leaves a program two thirds of the memory.
    """
    sizes = {"full": (2, 16, 512, SMOLLM_135M), "lora": (1, 32, 512, QWEN_0_6B), "qlora": (1, 32, 512, QWEN_1_7B)}
    return single(apple_m2_8gb, method, sizes)


def apple_m2_16gb(method: str) -> Preset:
    """M2 with 16 GB. Full: SmolLM2-135M at 512 tokens; LoRA: Qwen3-0.6B; QLoRA: Qwen3-1.7B.

    bfloat16 is emulated on M2, so fp16 over fp32 weights. No 8-bit optimizer exists for MPS. Trades compute for
    memory and leaves room for macOS.
    """
    sizes = {"full": (4, 8, 512, SMOLLM_135M), "lora": (1, 32, 512, QWEN_0_6B), "qlora": (1, 32, 512, QWEN_1_7B)}
    return single(apple_m2_16gb, method, sizes)


def apple_m4_max_64gb(method: str) -> Preset:
    """M4 Max with 64 GB. Full: SmolLM2-360M at 1024 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-8B.

    No 8-bit optimizer exists for MPS. Trades compute for memory: activations are recomputed.
    """
    sizes = {"full": (8, 4, 1024, SMOLLM_360M), "lora": (4, 8, 1024, QWEN_4B), "qlora": (2, 16, 1024, QWEN_8B)}
    return single(apple_m4_max_64gb, method, sizes)
