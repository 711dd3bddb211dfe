"""One sample of a million tokens on eight devices, beside published figures: python benchmarks/long_samples.py"""

import tomllib
from pathlib import Path

from accelerate import ParallelismConfig
from record import kept, record_each
from transformers import AutoConfig

from hf_memopt.estimator import estimate

ROWS = tomllib.loads((Path(__file__).parent / "data" / "long_samples.toml").read_text())["rows"]
TOKENS, DEVICES = 2**20, 8


def predicted(shape: dict, offload: bool):
    """The estimate of a row's job."""
    sizes = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": TOKENS}
    fields = {
        "per_device_train_batch_size": 1,
        "activation_checkpointing_kwargs": {"use_reentrant": False, "offload": offload},
        "parallelism_config": ParallelismConfig(cp_size=DEVICES),
    }
    config = AutoConfig.for_model("qwen3", **shape, **sizes)
    settings = {"dtype": "bfloat16", "world_size": DEVICES, "strategy": "fsdp2", "task": "sft"}
    return estimate(config, fields, TOKENS, "h100_80gb", **settings)


def compared(row: dict) -> dict:
    """A published row beside its prediction."""
    found = predicted(row["shape"], row["offload"])
    figures = {"allocated_bytes": found.peak_allocated_bytes, "predicted_seconds": found.step_seconds}
    return row | figures | kept(found, "device_bytes")


def again(row: dict) -> dict:
    """What is predicted now."""
    found = predicted(row["shape"], row["offload"])
    return {"allocated_bytes": found.peak_allocated_bytes} | kept(found, "device_bytes")


if __name__ == "__main__":
    record_each("long_samples", compared, [(row,) for row in ROWS])
