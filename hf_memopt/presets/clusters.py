"""Several cards in one machine. The batch is over all of them."""

from dataclasses import replace

from hf_memopt.presets.base import (
    LLAMA_70B,
    LLAMA_405B,
    QWEN_0_6B,
    QWEN_8B,
    QWEN_14B,
    QWEN_32B,
    describe,
    retrained,
    several,
)
from hf_memopt.presets.nvidia import a100_80gb, h100_80gb, l40s
from hf_memopt.presets.preset import Preset


def l40s_x4(method: str) -> Preset:
    """Four L40S (44.4 GiB usable each), DDP, 256 samples a step. Full: Qwen3-0.6B at 1024 tokens; LoRA: Qwen3-8B.

    The safe rung of a ladder: every activation is recomputed, so that speed is traded for a wide margin.
    """
    sizes = {"full": (2, 32, 1024, QWEN_0_6B), "lora": (2, 32, 1024, QWEN_8B), "qlora": (2, 32, 1024, QWEN_32B)}
    return several(l40s(method), l40s_x4, 4, "ddp", sizes)


def l40s_x4_medium(method: str) -> Preset:
    """l40s_x4 with only every second layer recomputed: faster, for more memory.

    (A micro-batch of 3 would make the step 252 samples; the effective batch stays 256 here. Of 32B in 4 bits only one
    sample at a time is predicted to fit so.)
    """
    safe = l40s_x4(method)
    if method == "qlora":
        safe = replace(safe, micro_batch_size=1)
    halved = {"use_reentrant": False, "every_n_layers": 2}
    return _renamed(retrained(safe, activation_checkpointing_kwargs=halved), l40s_x4_medium)


def l40s_x4_aggressive(method: str) -> Preset:
    """l40s_x4 with twice the micro-batch and half the accumulation: better use of the card, a thinner margin."""
    return _renamed(replace(l40s_x4(method), micro_batch_size=4), l40s_x4_aggressive)


def l40s_x4_maximum(method: str) -> Preset:
    """l40s_x4 at 1536 tokens: the longest samples of the ladder, which may run out of memory on a larger model."""
    return _renamed(replace(l40s_x4(method), seq_len=1536), l40s_x4_maximum)


def a100_80gb_x8(method: str) -> Preset:
    """Eight A100 80 GB, 64 samples a step at 4096 tokens. Full: Qwen3-14B; LoRA and QLoRA: Llama-3.1-70B.

    ZeRO-3 trades communication for memory: every layer's weights are gathered twice a micro-batch. 70B in full is
    16 bytes a parameter, 141 GB a card: it needs strategy zero3_offload_cpu. QLoRA runs under ZeRO-2, because
    ZeRO-3 does not shard 4-bit weights; they fit one card whole.
    """
    return _seventy(a100_80gb(method), a100_80gb_x8)


def h100_80gb_x8(method: str) -> Preset:
    """Eight H100 80 GB, 64 samples a step at 4096 tokens. Full: Qwen3-14B; LoRA and QLoRA: Llama-3.1-70B.

    ZeRO-3 trades communication for memory: every layer's weights are gathered twice a micro-batch. 70B in full is
    16 bytes a parameter, 141 GB a card: it needs strategy zero3_offload_cpu. QLoRA runs under ZeRO-2, because
    ZeRO-3 does not shard 4-bit weights; they fit one card whole.
    """
    return _seventy(h100_80gb(method), h100_80gb_x8)


def h100_80gb_x16_nodes(method: str) -> Preset:
    """Sixteen machines of eight H100 80 GB, 128 samples a step at 4096 tokens. Full, LoRA, QLoRA: Llama-3.1-405B.

    All weights are trained under ZeRO-3 with states and weights offloaded to the hosts: without that 405B is
    predicted to need more than a card has (docs/plans.md). LoRA runs under ZeRO-3, QLoRA under FSDP2, which shards
    4-bit weights. Every machine starts a launcher: `hf-memopt export h100_80gb_x16_nodes DIR` writes slurm.sbatch.
    """
    sizes = dict.fromkeys(("full", "lora", "qlora"), (1, 1, 4096, LLAMA_405B))
    strategy = {"full": "zero3_offload_cpu", "lora": "zero3", "qlora": "fsdp2"}[method]
    return replace(several(h100_80gb(method), h100_80gb_x16_nodes, 128, strategy, sizes), machines=16)


def _seventy(card: Preset, function) -> Preset:
    sizes = {"full": (1, 8, 4096, QWEN_14B), "lora": (1, 8, 4096, LLAMA_70B), "qlora": (1, 8, 4096, LLAMA_70B)}
    return several(card, function, 8, "zero2" if card.method == "qlora" else "zero3", sizes)


def _renamed(preset: Preset, function) -> Preset:
    return replace(preset, name=function.__name__, meant_for=describe(function))
