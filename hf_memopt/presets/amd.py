"""AMD cards under ROCm. Each docstring says what the numbers are meant for and what they trade."""

from hf_memopt.presets.base import (
    QWEN_0_6B,
    QWEN_1_7B,
    QWEN_4B,
    QWEN_8B,
    QWEN_32B,
    SMOLLM_135M,
    SMOLLM_360M,
    single,
)
from hf_memopt.presets.preset import Preset


def rx_6750_xt(method: str) -> Preset:
    """RX 6750 XT, 12 GB. Full: SmolLM2-135M at 512 tokens; LoRA: Qwen3-0.6B; QLoRA: Qwen3-1.7B.

    No bfloat16 and no matrix units: fp16 over fp32 weights, sdpa attention. Runs as gfx1030. QLoRA depends on a
    bitsandbytes build for that target, which the published ones do not promise. Trades much compute for memory.
    """
    sizes = {"full": (2, 16, 512, SMOLLM_135M), "lora": (1, 32, 512, QWEN_0_6B), "qlora": (1, 32, 512, QWEN_1_7B)}
    return single(rx_6750_xt, method, sizes)


def rx_7900_xtx(method: str) -> Preset:
    """RX 7900 XTX, 24 GB. Full: SmolLM2-360M at 1024 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-8B.

    Trades compute for memory: activations are recomputed, and full fine-tuning keeps 8-bit optimizer states.
    """
    sizes = {"full": (8, 4, 1024, SMOLLM_360M), "lora": (2, 16, 1024, QWEN_4B), "qlora": (2, 16, 1024, QWEN_8B)}
    return single(rx_7900_xtx, method, sizes)


def mi300x(method: str) -> Preset:
    """Instinct MI300X, 192 GB. Full: Qwen3-1.7B at 4096 tokens; LoRA and QLoRA: Qwen3-32B.

    Trades compute for length: activations are recomputed.
    """
    sizes = {"full": (12, 4, 4096, QWEN_1_7B), "lora": (6, 8, 4096, QWEN_32B), "qlora": (6, 8, 4096, QWEN_32B)}
    return single(mi300x, method, sizes)
