"""Plans and predictions for what the project's founding guides describe: python benchmarks/plans.py

Nothing here is measured: plans and estimates, beside what the guides say. docs/plans.md is made from the result.
"""

import json
import time
from dataclasses import asdict

from jobs import CHECKPOINTED, lora
from record import kept, record

from hf_memopt import MemoryArguments, estimate, plan
from hf_memopt.errors import InputError

GB = 10**9
# What the guides ask for: model, hardware, tokens, effective batch, method.
PLANS = [
    ("8B on one 24 GB card", "llama-3.1-8b", "rtx_4090", 2048, 32, "any"),
    ("7B on one 24 GB card", "llama-2-7b", "rtx_4090", 2048, 16, "full"),
    ("7B on one 24 GB card", "llama-2-7b", "rtx_4090", 2048, 16, "lora"),
    ("7B on one 24 GB card", "llama-2-7b", "rtx_4090", 2048, 16, "qlora"),
    ("70B on 8 × 80 GB", "llama-3.1-70b", "a100_80gbx8", 4096, 64, "full"),
    ("70B on 8 × 80 GB", "llama-3.1-70b", "a100_80gbx8", 4096, 64, "lora"),
    ("405B on 128 × H100", "llama-3.1-405b", "h100_80gbx128", 4096, 128, "full"),
    ("405B on 128 × H100", "llama-3.1-405b", "h100_80gbx128", 4096, 128, "lora"),
]


def planned(title: str, model: str, hardware: str, seq_len: int, batch: int, method: str) -> dict:
    """A plan's row."""
    began = time.perf_counter()
    found = plan(model, hardware, batch, seq_len, method, say=lambda text: print("   ", text, flush=True))
    took = time.perf_counter() - began
    profiles = [
        {"profile": profile.name, "settings": profile.summary}
        | kept(profile.estimate, "device_bytes", "host_bytes", "breakdown")
        | {"relative_speed": round(profile.relative_speed, 3)}
        for profile in found
    ]
    row = {"table": "plan", "title": title, "model": model, "hardware": hardware, "method": method, "tokens": seq_len}
    row |= {"effective_batch_size": batch, "profiles": profiles, "rejected": [asdict(one) for one in found.rejected]}
    return row | kept(found, "missing_bytes", "nearest") | {"seconds": round(took, 1)}


def guessed(table: str, title: str, guide_gb: str, model, fields: dict, seq_len: int, hardware: str, **more) -> dict:
    """A guide's settings, estimated."""
    row = {"table": table, "title": title, "guide_gb": guide_gb, "hardware": hardware, "tokens": seq_len}
    try:
        found = estimate(model, fields, seq_len, hardware, **{"dtype": "float32", **more})
    except InputError as error:
        return row | {"error": str(error)}
    return row | kept(found, "device_bytes", "peak_allocated_bytes", "phase", "breakdown", "capacity_bytes", "fits")


def model_of_34_million():
    """34,083,904 weights in the guide, which does not tell their architecture: a Llama of about as many."""
    from transformers import LlamaConfig

    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
    return LlamaConfig(**sizes, vocab_size=8192, tie_word_embeddings=False)


BF16 = {"bf16": True, **CHECKPOINTED}
FP16 = {"fp16": True, **CHECKPOINTED}
# Table -> title, what the guide says (GB), model, hardware, micro-batch, accumulation, tokens, fields, and more of
# estimate()'s arguments.
GUIDES = {
    "settings": [
        (
            *("7B, bf16, checkpointing, micro-batch 1 × 16, 8-bit Adam, on 24 GB", "20", "llama-2-7b", "rtx_4090"),
            *(1, 16, 2048, {**BF16, "optim": "adamw_8bit"}, {"dtype": "bfloat16"}),
        ),
        (
            "70B, bf16, ZeRO-3, checkpointing, micro-batch 1 × 8, 4096 tokens, on 8 × 80 GB",
            *("60", "llama-3.1-70b", "a100_80gb", 1, 8, 4096, BF16),
            {"dtype": "bfloat16", "world_size": 8, "strategy": "zero3"},
        ),
        (
            "405B, ZeRO-3 without offloading, checkpointing, micro-batch 1, on 128 × H100",
            *("", "llama-3.1-405b", "h100_80gb", 1, 1, 4096, BF16),
            {"dtype": "bfloat16", "world_size": 128, "strategy": "zero3"},
        ),
    ],
    "small test": [
        (
            *("34M weights, micro-batch 2, 512 tokens, checkpointing", "0.63", None, "rtx_3060"),
            *(2, 1, 512, {**CHECKPOINTED, "optim": "sgd"}, {}),
        ),
    ],
    "platforms": [
        (title, guide, "smollm2-135m", hardware, micro, accumulation, tokens, fields, {})
        for title, guide, hardware, micro, accumulation, tokens, fields in (
            ("as it was: 16 × 2, 1024 tokens", "32", "rtx_3090", 16, 2, 1024, {"bf16": True}),
            ("NVIDIA: 8 × 4, 1024 tokens", "4–5", "rtx_3060", 8, 4, 1024, {"bf16": True}),
            ("AMD: 2 × 16, 512 tokens, checkpointing", "2.6", "rx_6750_xt", 2, 16, 512, FP16),
            ("Apple: 4 × 8, 512 tokens, checkpointing", "4–5", "apple_m2_16gb", 4, 8, 512, FP16),
        )
    ],
    "512M on 44 GB": [
        (title, guide, "qwen3-0.6b", "l40s", micro, 1, tokens, BF16, {"world_size": 4, "strategy": "ddp"})
        for title, guide, micro, tokens in (
            ("1 × 1024 tokens", "35", 1, 1024),
            ("2 × 1024, safe", "38–40", 2, 1024),
            ("3 × 1024, medium", "", 3, 1024),
            ("4 × 1024, aggressive", "", 4, 1024),
            ("2 × 1536, maximum", "may run out", 2, 1536),
            ("8 × 2048, which ran out", "51 and more", 8, 2048),
        )
    ],
}


def guides() -> list[dict]:
    """The settings of the guides' practical configurations and tables."""
    rows = []
    for name, table in GUIDES.items():
        for title, guide, model, hardware, micro, accumulation, tokens, fields, more in table:
            batches = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
            fields, model = {**fields, **batches}, model or model_of_34_million()
            rows.append(guessed(name, title, guide, model, fields, tokens, hardware, **more))
    rows.append(_video("before: fp32, all activations, 200 frames", "12–16", {}, "float32", 200))
    rows.append(_video("after: bf16, checkpointing, 100 frames", "4–6", BF16, "bfloat16", 100))
    return rows + sharded()


def _video(title: str, guide: str, fields: dict, dtype: str, frames: int) -> dict:
    from hf_memopt.video.inputs import VideoInputs
    from hf_memopt.video.published import published_settings

    model, fields = "qwen2.5-vl-3b", {**fields, "per_device_train_batch_size": 1}
    more = {"dtype": dtype, "peft_config": lora(16), "frozen": ("vision",)}
    more["memory_args"] = MemoryArguments(logits_to_keep=dtype != "float32")
    more["video"] = VideoInputs(frames, max_pixels_per_frame=224 * 224, settings=published_settings(model))
    return guessed("2B video", title, guide, model, fields, 1, "rtx_3090", **more)


def sharded() -> list[dict]:
    """ZeRO's table for 7B on 8 devices: the guide's own bytes a weight, and what the engines hold."""
    weights = 7 * GB
    rows = []
    for stage, strategy in enumerate(("ddp", "zero1", "zero2", "zero3")):
        parts = [
            2 * weights / (8 if stage >= 3 else 1),
            2 * weights / (8 if stage >= 2 else 1),
            4 * weights / (8 if stage >= 1 else 1),
        ]
        fields = {**BF16, "per_device_train_batch_size": 1}
        more = {"dtype": "bfloat16", "world_size": 8, "strategy": strategy}
        guide = f"{(56, 31.5, 19.25, 7)[stage]}"
        row = guessed("ZeRO", strategy, guide, "llama-2-7b", fields, 2048, "a100_80gb", **more)
        rows.append(row | {"by_the_guides_bytes_gb": sum(parts) / GB, "deepspeeds_formula_bytes": _formula(stage)})
    return rows


def _formula(stage: int) -> int | None:
    """DeepSpeed's own estimate of weights, gradients and states a device, for Llama-2-7B on 8; it has none below 2."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    weights, largest = 6_738_415_616, 32000 * 4096
    if stage == 2:
        return int(estimate_zero2_model_states_mem_needs(weights, 8, 1, cpu_offload=False)[1])
    if stage == 3:
        return int(estimate_zero3_model_states_mem_needs(weights, largest, 8, 1, False, False, True)[1])
    return None


def tensor_and_pipeline_split() -> dict:
    """405B by tensor parallelism 8 × pipeline 4 × data 4 with ZeRO-1, by arithmetic: a device holds a 32nd of weights
    and gradients (bf16) and of that the 4th part of fp32 masters and states (12 bytes)."""
    share = 405.9e9 / (8 * 4)
    return {"table": "split", "weights_bytes": 2 * share, "gradients_bytes": 2 * share, "states_bytes": 12 * share / 4}


def main() -> None:
    rows = []
    for row in PLANS:
        print(row, flush=True)
        rows.append(planned(*row))
    rows += [*guides(), tensor_and_pipeline_split()]
    for row in rows:
        print(json.dumps({name: value for name, value in row.items() if name != "profiles"})[:300])
    record("plans", rows)


if __name__ == "__main__":
    main()
