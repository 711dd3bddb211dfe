"""DeepSpeed's ZeRO: gradients, optimizer states and weights in flat buffers, each process its part."""

import base64
import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from hf_memopt.engines.deepspeed_values import check_deepspeed
from hf_memopt.engines.engine import Engine, Exchange, is_inline_json, read_settings
from hf_memopt.errors import InputError, brief, choose
from hf_memopt.files import read_json, shipped
from hf_memopt.findings import value_at

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
# DeepSpeed's batch sizes, and the TrainingArguments fields that say the same.
_SIZES = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_BUCKET = 5e8  # elements: DeepSpeed's default of reduce_bucket_size
_UNLIMITED = 1e9  # elements: DeepSpeed's default of every limit of ZeRO-3 (deepspeed.runtime.zero.config)


@dataclass(frozen=True)
class DeepSpeed(Engine):
    """Its strategy names the stage and where states are; `deepspeed` is None where no more than that is known."""

    strategy: str = "zero0"
    deepspeed: Mapping[str, Any] | None = None

    family: ClassVar = "deepspeed"
    plain: ClassVar = False
    distributed_type: ClassVar = "DEEPSPEED"
    beside: ClassVar = ("deepspeed",)
    package: ClassVar = "deepspeed"
    master_weights: ClassVar = True
    flat_buffers: ClassVar = True

    @classmethod
    def of_config(cls, config: Mapping[str, Any], source: str = "deepspeed") -> "DeepSpeed":
        """The engine of a configuration, whose strategy is named zero2, zero3_offload_nvme, zero3_plus_plus, …"""
        zero, device = config.get("zero_optimization") or {}, _offload(config)
        offloads = "" if device == "none" else f"_offload_{device}"
        suffix = "_plus_plus" if zero.get("zero_quantized_weights") else offloads
        return cls(f"zero{zero.get('stage', 0)}{suffix}", source, deepspeed=config)

    @property
    def name(self) -> str:
        return f"zero{self.zero_stage}"

    @property
    def zero_stage(self) -> int:
        return int(self.strategy[4])

    @property
    def offload(self) -> str:
        if self.deepspeed is not None:
            return _offload(self.deepspeed)
        return self.strategy.partition("_offload_")[2] or "none"

    shards_weights = property(lambda self: self.zero_stage == 3)
    shards_gradients = property(lambda self: self.zero_stage >= 2)
    shards_states = property(lambda self: self.zero_stage >= 1)
    gathers_to_generate = property(lambda self: "ZeRO-3" if self.zero_stage == 3 else "")

    @property
    def fewest_layers(self) -> int:
        """ZeRO-1 and 2 split all weights into flat partitions, of which the embeddings must not take most."""
        return 4 if self.zero_stage == 3 else 10

    @property
    def live_weights(self) -> float | None:
        if self.zero_stage < 3:
            return None
        return max(self._limit(f"stage3_max_{name}") for name in ("live_parameters", "reuse_distance"))

    @property
    def gradient_bucket(self) -> float | None:
        if self.zero_stage != 2:
            return None
        size = self.deepspeed.get("zero_optimization", {}).get("reduce_bucket_size", _BUCKET)
        return None if size == "auto" else float(size)

    @property
    def step_group(self) -> float | None:
        return self._limit("sub_group_size") if self.zero_stage == 3 else None

    def _limit(self, name: str) -> float:
        """A limit of ZeRO-3 in elements."""
        value = self.deepspeed.get("zero_optimization", {}).get(name, _UNLIMITED)
        return _UNLIMITED if value == "auto" else float(value)

    def shipped_config(self):
        return read_json(shipped("accelerate_configs") / "deepspeed" / f"{self.strategy}.json")

    def fields(self, before):
        return {"deepspeed": deepspeed_config(self.strategy)}

    def check(self, fields, world_size):
        for name, size in numeric_batch_sizes(self.deepspeed).items():
            if size != fields[name]:
                raise InputError(
                    f"the DeepSpeed JSON has {brief(size)} and TrainingArguments {fields[name]} for {name}: leave one "
                    'out, or write "auto" in the JSON'
                )
        total = self.deepspeed.get("train_batch_size", "auto")
        batch = world_size * fields["per_device_train_batch_size"] * fields["gradient_accumulation_steps"]
        if total not in ("auto", batch):
            raise InputError(
                f"the DeepSpeed JSON has train_batch_size={brief(total)}, and micro-batch × accumulation × processes "
                f'is {batch}: write "auto" in the JSON'
            )

    def traceable(self, fields):
        """Batch sizes become "auto", because fewer micro-batches are traced than run."""
        config = copy.deepcopy(fields["deepspeed"])
        for name in (*BATCH_SIZES, "gradient_accumulation_steps"):
            config[name] = "auto"
        return {**fields, "deepspeed": config}

    def peak_rank(self, world_size):
        """Under ZeRO-1 and 2 the last: it owns the gradients that backward computes first, and holds them from then
        on."""
        return world_size - 1 if self.zero_stage < 3 else 0

    def rank_bytes(self, ranks, loaded, trained, gradients, gathered):
        """By ZeRO's arithmetic (Rajbhandari et al. 2020, figure 1): 2 bytes a weight and a gradient and 12 of fp32
        master weight and states."""
        on_device = not self.offloads
        return {
            "parameters": (loaded / ranks * on_device) if self.shards_weights else loaded,
            "gradients": 2 * trained / (ranks if self.shards_gradients else 1) * on_device,
            "optimizer_states": 12 * trained / ranks * on_device,
            # Live weights and buckets, as the shipped JSONs bound them.
            "communication": 2e9 if self.shards_weights else 1e9,
        }

    def exchanged(self, weights, gradients):
        if self.strategy.endswith("_plus_plus"):
            # ZeRO++ (Wang et al. 2023): 8-bit weights, a copy in each box, 4-bit gradients
            return [Exchange(weights / 2), Exchange(weights / 2, in_box=True), Exchange(gradients / 4)]
        if self.shards_weights:
            return [Exchange(weights), Exchange(weights), Exchange(gradients)]
        if self.shards_gradients:  # they go to their owner after every micro-batch
            return [Exchange(gradients), Exchange(gradients, per_step=True)]
        return super().exchanged(weights, gradients)


def numeric_batch_sizes(deepspeed: Mapping[str, Any]) -> dict[str, int]:
    """The batch sizes that a configuration has as numbers, as TrainingArguments fields."""
    return {name: deepspeed[key] for key, name in _SIZES.items() if deepspeed.get(key, "auto") != "auto"}


def _offload(config: Mapping[str, Any]) -> str:
    zero = config.get("zero_optimization") or {}
    return (zero.get("offload_optimizer") or {}).get("device") or "none"


def deepspeed_files() -> list[Path]:
    """The shipped DeepSpeed configurations."""
    return sorted((shipped("accelerate_configs") / "deepspeed").glob("*.json"))


def shipped_deepspeed(name: str) -> Path | None:
    """The shipped DeepSpeed JSON of that name; None where there is none."""
    return next((file for file in deepspeed_files() if file.stem == name), None)


def deepspeed_config(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A DeepSpeed configuration from itself, its JSON, that in base64, a file, or a shipped file's name (zero2, …).

    Raises:
        InputError: there is no such file or name, it is not JSON, or DeepSpeed cannot read a value of it.
    """
    if not isinstance(config, Mapping | str | Path):
        raise InputError(f"deepspeed={brief(config)} must be a file, a mapping or a name, as in zero3")
    if isinstance(config, Mapping) or is_inline_json(config) or os.path.isfile(config):  # Path.is_file fails: too long
        content = read_settings(config, "deepspeed")
    elif (content := decode_inline(str(config))) is None:
        if file := shipped_deepspeed(str(config)):
            return read_json(file)
        if "/" not in str(config) and not str(config).endswith(".json"):
            raise choose("deepspeed configuration", str(config), (file.stem for file in deepspeed_files()))
        content = read_json(config)
    return _filled(check_deepspeed(content))


def _filled(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with the stage and devices that accelerate's plugin puts in place of "auto" (1.15,
    utils.dataclasses.DeepSpeedPlugin)."""
    zero = config.get("zero_optimization") or {}
    parts = {name: part | {"device": "none"} for name, part in zero.items() if value_at(part, ("device",)) == "auto"}
    parts |= {"stage": 2} if zero.get("stage") == "auto" else {}
    return {**config, "zero_optimization": {**zero, **parts}} if parts else config


def missing_batch_size(config: Mapping[str, Any]) -> str | None:
    """The advice where a DeepSpeed configuration has no batch size, which DeepSpeed refuses; None where it has."""
    if any(config.get(name) is not None for name in BATCH_SIZES):
        return None
    return (
        "the DeepSpeed configuration has neither train_batch_size nor train_micro_batch_size_per_gpu: add "
        '"train_micro_batch_size_per_gpu": "auto", and "auto" for gradient_accumulation_steps, gradient_clipping and '
        "the enabled of bf16 and fp16, so that TrainingArguments decide them"
    )


def decode_inline(text: str) -> dict[str, Any] | None:
    """A DeepSpeed configuration that is written as base64, as in the shipped YAMLs; None where the text is none."""
    try:
        content = json.loads(base64.b64decode(text, altchars=b"-_", validate=True))
    except (ValueError, RecursionError):  # binascii.Error and UnicodeDecodeError are ValueErrors
        return None
    return content if isinstance(content, dict) else None
