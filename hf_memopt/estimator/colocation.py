"""Memory of vLLM on the card that trains (TRL's vllm_mode=colocate): arithmetic from its documented settings.

Nothing of vLLM runs here. Its engine takes `gpu_memory_utilization` of the card's memory for weights, activations and
KV cache together (vLLM's CacheConfig; vllm/v1/worker/gpu_worker.py, determine_available_memory), from the moment that
the trainer is made. With sleep mode TRL puts it to sleep at level 2 after each generation (trl 1.16,
generation/vllm_generation.py), which frees weights and cache; level 1 would keep the weights in host memory.
"""

import copy
from collections.abc import Mapping
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import GENERATION, WEIGHT_SYNC, Peak
from hf_memopt.estimator.tracing.extrapolate import count_layers
from hf_memopt.units import gib

# TRL 1.16's defaults (GRPOConfig, RLOOConfig).
_SHARE, _MODE = 0.3, "colocate"
# vLLM's activations and CUDA graphs beside weights and cache: assumed, vLLM measures them when it starts.
OWN_MEMORY = 1.1
_BYTES = 2  # of a weight: vLLM loads 32-bit checkpoints in 16 bits (dtype="auto")


def colocates(fields: dict[str, Any]) -> bool:
    """True if an engine of vLLM shares the card."""
    return bool(fields.get("use_vllm")) and fields.get("vllm_mode", _MODE) == "colocate"


def add_engine(peaks: dict[str, Peak], job) -> None:
    """Add vLLM's share to the peaks of the phases that it is there in.

    Args:
        job: a Job; without vLLM nothing is added.

    Raises:
        InputError: the share is smaller than the weights, with which vLLM does not start.
    """
    if not job.fields.get("use_vllm"):
        return
    # The model waits while vLLM generates; before that its weights are sent one by one.
    waiting = peaks["between"]
    peaks[GENERATION], peaks[WEIGHT_SYNC] = copy.deepcopy(waiting), copy.deepcopy(waiting)
    if not colocates(job.fields):
        return
    share, weights = engine_share(job), engine_weights(job, peaks)
    if weights > share:
        raise InputError(
            f"vllm_gpu_memory_utilization={utilization(job.fields)} is {gib(share)}, and vLLM's copy of the weights "
            f"takes {gib(weights)}: raise it, or vllm_tensor_parallel_size"
        )
    sleeps = job.fields.get("vllm_enable_sleep_mode")
    for name, peak in peaks.items():
        if name == GENERATION or not (sleeps or name.startswith(("load", "start"))):
            peak.grow("other", share)
    if sleeps:
        peaks[WEIGHT_SYNC].grow("other", weights)


def notes_on_engine(job, peaks: dict[str, Peak]) -> list[str]:
    """The result of the arithmetic, and what it leaves out."""
    if not job.fields.get("use_vllm"):
        return []
    if not colocates(job.fields):
        return ["vLLM's server has cards of its own, which are not in these figures"]
    share, weights = engine_share(job), engine_weights(job, peaks)
    sleeps = job.fields.get("vllm_enable_sleep_mode")
    times = "while it generates: it sleeps at level 2 otherwise" if sleeps else "all the time"
    tokens = int((share - weights) / cache_bytes(job.config))
    return [
        f"vLLM: arithmetic, not measured: {gib(share)} ({utilization(job.fields)} of {gib(job.device.memory)}) "
        f"{times}, with {gib(weights)} of weights and a KV cache of at most {tokens:,} tokens, less vLLM's own "
        "activations and CUDA graphs; counted as other"
    ]


def utilization(fields: Mapping[str, Any]) -> float:
    """The share of the card that vLLM takes beside training."""
    return fields.get("vllm_gpu_memory_utilization", _SHARE)


def engine_share(job) -> int:
    """Bytes of the card that vLLM takes.

    Raises:
        InputError: the card's memory is not known.
    """
    if job.device.memory is None:
        raise InputError(f"use_vllm=True: the memory of {job.device.label} is not known, of which vLLM takes a share")
    return int(job.device.memory * utilization(job.fields))


def engine_weights(job, peaks: dict[str, Peak]) -> int:
    """Bytes of the engine's own copy of the weights, on one of its cards."""
    cards = job.fields.get("vllm_tensor_parallel_size", 1)
    if job.quantization_config is not None:
        return peaks["load"].by_kind.get("parameters", 0) // cards
    outside, layer = job.elements()
    return (outside + layer * count_layers(job.config)) * _BYTES // cards


def cache_bytes(config) -> int:
    """Bytes of the keys and values of a token, in 16 bits."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * count_layers(config) * heads * size * _BYTES
