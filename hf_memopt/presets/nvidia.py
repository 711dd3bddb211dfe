"""NVIDIA cards. Each docstring says what the numbers are meant for and what they trade."""

from hf_memopt.presets.base import (
    QWEN_0_6B,
    QWEN_1_7B,
    QWEN_4B,
    QWEN_8B,
    QWEN_14B,
    QWEN_32B,
    SMOLLM_135M,
    SMOLLM_360M,
    single,
)
from hf_memopt.presets.preset import Preset


def rtx_3060(method: str) -> Preset:
    """RTX 3060, 12 GB. Full: SmolLM2-135M at 1024 tokens; LoRA: Qwen3-1.7B; QLoRA: Qwen3-8B.

    Trades compute for memory: activations are recomputed, and full fine-tuning keeps 8-bit optimizer states.
    """
    sizes = {"full": (8, 4, 1024, SMOLLM_135M), "lora": (2, 16, 1024, QWEN_1_7B), "qlora": (1, 32, 1024, QWEN_8B)}
    return single(rtx_3060, method, sizes)


def rtx_3070(method: str) -> Preset:
    """RTX 3070, 8 GB. Full: SmolLM2-135M at 1024 tokens; LoRA: Qwen3-0.6B; QLoRA: Qwen3-4B at 512 tokens.

    Trades compute and length for memory: small micro-batches, recomputed activations, 8-bit optimizer states.
    """
    sizes = {"full": (4, 8, 1024, SMOLLM_135M), "lora": (1, 32, 1024, QWEN_0_6B), "qlora": (1, 32, 512, QWEN_4B)}
    return single(rtx_3070, method, sizes)


def rtx_3080(method: str) -> Preset:
    """RTX 3080, 10 GB. Full: SmolLM2-135M at 1024 tokens; LoRA: Qwen3-1.7B; QLoRA: Qwen3-4B.

    Trades compute for memory: small micro-batches, recomputed activations, 8-bit optimizer states.
    """
    sizes = {"full": (4, 8, 1024, SMOLLM_135M), "lora": (1, 32, 1024, QWEN_1_7B), "qlora": (1, 32, 1024, QWEN_4B)}
    return single(rtx_3080, method, sizes)


def rtx_3090(method: str) -> Preset:
    """RTX 3090, 24 GB. Full: SmolLM2-135M at 256 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-14B, both at 1024.

    Full fine-tuning trades length for speed: nothing is recomputed. The adapters trade compute for a larger model.
    """
    sizes = {"full": (12, 4, 256, SMOLLM_135M), "lora": (4, 12, 1024, QWEN_4B), "qlora": (2, 24, 1024, QWEN_14B)}
    return single(rtx_3090, method, sizes, activation_checkpointing=method != "full")


def rtx_3090_ti(method: str) -> Preset:
    """RTX 3090 Ti, 24 GB. Full: SmolLM2-135M at 256 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-14B, both at 1024.

    Full fine-tuning trades length for speed: nothing is recomputed. The adapters trade compute for a larger model.
    """
    sizes = {"full": (12, 4, 256, SMOLLM_135M), "lora": (4, 12, 1024, QWEN_4B), "qlora": (2, 24, 1024, QWEN_14B)}
    return single(rtx_3090_ti, method, sizes, activation_checkpointing=method != "full")


def rtx_4080(method: str) -> Preset:
    """RTX 4080, 16 GB. Full: SmolLM2-135M at 1024 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-8B.

    Trades compute for memory: activations are recomputed, and full fine-tuning keeps 8-bit optimizer states.
    """
    sizes = {"full": (8, 4, 1024, SMOLLM_135M), "lora": (2, 16, 1024, QWEN_4B), "qlora": (2, 16, 1024, QWEN_8B)}
    return single(rtx_4080, method, sizes)


def rtx_4090(method: str) -> Preset:
    """RTX 4090, 24 GB. Full: SmolLM2-135M at 512 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-14B, both at 1024.

    Full fine-tuning trades length for speed: nothing is recomputed. The adapters trade compute for a larger model.
    """
    sizes = {"full": (16, 4, 512, SMOLLM_135M), "lora": (4, 16, 1024, QWEN_4B), "qlora": (2, 32, 1024, QWEN_14B)}
    return single(rtx_4090, method, sizes, activation_checkpointing=method != "full")


def rtx_5090(method: str) -> Preset:
    """RTX 5090, 32 GB. Full: Qwen3-0.6B at 1024 tokens; LoRA: Qwen3-4B at 2048; QLoRA: Qwen3-14B at 1024.

    Trades compute for a larger model: activations are recomputed, and full fine-tuning keeps 8-bit states.
    """
    sizes = {"full": (8, 8, 1024, QWEN_0_6B), "lora": (4, 16, 2048, QWEN_4B), "qlora": (4, 16, 1024, QWEN_14B)}
    return single(rtx_5090, method, sizes)


def t4(method: str) -> Preset:
    """T4, 16 GB. Full: SmolLM2-135M at 512 tokens; LoRA: Qwen3-1.7B; QLoRA: Qwen3-4B at 1024.

    No native bfloat16: fp16 with a gradient scaler over fp32 weights. Trades compute and length for memory.
    """
    sizes = {"full": (8, 4, 512, SMOLLM_135M), "lora": (2, 16, 512, QWEN_1_7B), "qlora": (1, 32, 1024, QWEN_4B)}
    return single(t4, method, sizes)


def v100_32gb(method: str) -> Preset:
    """V100 SXM2, 32 GB. Full: SmolLM2-360M at 1024 tokens; LoRA: Qwen3-1.7B; QLoRA: Qwen3-8B.

    No native bfloat16: fp16 with a gradient scaler over fp32 weights. Trades compute for memory.
    """
    sizes = {"full": (8, 4, 1024, SMOLLM_360M), "lora": (4, 8, 1024, QWEN_1_7B), "qlora": (2, 16, 1024, QWEN_8B)}
    return single(v100_32gb, method, sizes)


def l4(method: str) -> Preset:
    """L4, 24 GB. Full: SmolLM2-360M at 1024 tokens; LoRA: Qwen3-4B; QLoRA: Qwen3-8B.

    Little memory bandwidth, so small micro-batches cost little. Trades compute for memory.
    """
    sizes = {"full": (8, 4, 1024, SMOLLM_360M), "lora": (2, 16, 1024, QWEN_4B), "qlora": (2, 16, 1024, QWEN_8B)}
    return single(l4, method, sizes)


def l40s(method: str) -> Preset:
    """L40S, 48 GB. Full: Qwen3-0.6B at 1024 tokens; LoRA: Qwen3-8B; QLoRA: Qwen3-32B.

    Trades compute for memory: activations are recomputed.
    """
    sizes = {"full": (2, 32, 1024, QWEN_0_6B), "lora": (8, 8, 1024, QWEN_8B), "qlora": (4, 16, 1024, QWEN_32B)}
    return single(l40s, method, sizes)


def a100_40gb(method: str) -> Preset:
    """A100, 40 GB. Full: Qwen3-0.6B at 512 tokens; LoRA: Qwen3-8B; QLoRA: Qwen3-14B, both at 1024.

    Trades compute for memory: activations are recomputed. Optimizer states stay in 32 bits.
    """
    sizes = {"full": (8, 4, 512, QWEN_0_6B), "lora": (4, 8, 1024, QWEN_8B), "qlora": (4, 8, 1024, QWEN_14B)}
    return single(a100_40gb, method, sizes)


def a100_80gb(method: str) -> Preset:
    """A100, 80 GB. Full: Qwen3-1.7B at 2048 tokens; LoRA: Qwen3-8B; QLoRA: Qwen3-32B.

    Trades compute for length: activations are recomputed. Optimizer states stay in 32 bits.
    """
    sizes = {"full": (4, 8, 2048, QWEN_1_7B), "lora": (4, 8, 2048, QWEN_8B), "qlora": (4, 8, 2048, QWEN_32B)}
    return single(a100_80gb, method, sizes)


def h100_80gb(method: str) -> Preset:
    """H100 SXM, 80 GB. Full: Qwen3-0.6B at 4096 tokens; LoRA: Qwen3-8B; QLoRA: Qwen3-32B.

    Trades minutes of compilation for speed (not under QLoRA) and compute for length.
    """
    sizes = {"full": (6, 8, 4096, QWEN_0_6B), "lora": (2, 24, 4096, QWEN_8B), "qlora": (2, 24, 4096, QWEN_32B)}
    return single(h100_80gb, method, sizes)


def h200(method: str) -> Preset:
    """H200 SXM, 141 GB. Full: Qwen3-1.7B at 4096 tokens; LoRA: Qwen3-14B; QLoRA: Qwen3-32B.

    Trades minutes of compilation for speed (not under QLoRA) and compute for length.
    """
    sizes = {"full": (8, 6, 4096, QWEN_1_7B), "lora": (4, 12, 4096, QWEN_14B), "qlora": (4, 12, 4096, QWEN_32B)}
    return single(h200, method, sizes)


def b200(method: str) -> Preset:
    """B200 SXM, 180 GB. Full: Qwen3-1.7B at 4096 tokens; LoRA and QLoRA: Qwen3-32B.

    Trades minutes of compilation for speed (not under QLoRA) and compute for length.
    """
    sizes = {"full": (12, 4, 4096, QWEN_1_7B), "lora": (6, 8, 4096, QWEN_32B), "qlora": (6, 8, 4096, QWEN_32B)}
    return single(b200, method, sizes)
