"""The engine that a job trains under: what was passed, launched or handed to accelerate, brought to one form."""

import base64
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memopt.compatibility.deepspeed_values import check_deepspeed
from hf_memopt.compatibility.mesh import is_mesh
from hf_memopt.errors import InputError, as_input_error, brief, choose
from hf_memopt.files import read_json, shipped

BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")


@dataclass(frozen=True)
class Engine:
    """An engine and those of its settings that decide what works with it.

    Attributes:
        strategy: none | ddp | fsdp2 | tpN, hsdpN, tpN_hsdpM | a name like those in accelerate_configs/deepspeed.
        source: the setting that asks for it, as a refusal names it.
        deepspeed: DeepSpeed's configuration; None under other engines.
        fsdp_version: 1 or 2; None without FSDP.
        checkpointing: it checkpoints activations itself (fsdp_activation_checkpointing).
        reshards: FSDP frees a layer's gathered weights after its forward pass (fsdp_reshard_after_forward).
        offloads: FSDP keeps weights and states in host memory (fsdp_offload_params).
        tp_size: processes that share every layer, by accelerate's ParallelismConfig.
    """

    strategy: str = "none"
    source: str = ""
    deepspeed: Mapping[str, Any] | None = None
    fsdp_version: int | None = None
    checkpointing: bool = False
    reshards: bool = True
    offloads: bool = False
    tp_size: int = 1

    @classmethod
    def of_deepspeed(cls, config: Mapping[str, Any], source: str = "deepspeed") -> "Engine":
        return cls(deepspeed_strategy(config), source, deepspeed=config)

    @classmethod
    def of_fsdp(
        cls,
        version: int,
        checkpointing: object,
        source: str = "fsdp",
        reshards: object = None,
        offloads: object = None,
    ) -> "Engine":
        return cls(
            "fsdp2",
            source,
            fsdp_version=version,
            checkpointing=is_true(checkpointing),
            reshards=reshards is None or not keeps_gathered(reshards),
            offloads=is_true(offloads),
        )

    @property
    def name(self) -> str:
        """The engine in the terms of the compatibility table."""
        if self.tp_size > 1 and self.deepspeed is None:
            return "tp"  # FSDP2 may shard what tensor parallelism leaves; the table's rows are the latter's
        return "fsdp1" if self.fsdp_version == 1 else split_strategy(self.strategy)[0]

    @property
    def label(self) -> str:
        """The engine as a refusal names it."""
        return f"fsdp{self.fsdp_version}" if self.fsdp_version else self.strategy

    @property
    def offload(self) -> str:
        """Where the optimizer's states are: none, cpu or nvme."""
        return "none" if self.deepspeed is None else _offload(self.deepspeed)

    @property
    def shards(self) -> bool:
        """Whether it changes how the model, its gradients or its states are held; DDP does not."""
        return self.name not in ("none", "ddp")

    def setup(self) -> dict[str, Any]:
        """The fields of a compatibility Setup that it decides."""
        return {
            "strategy": self.name,
            "offload": self.offload,
            "engine_checkpointing": self.checkpointing,
            "engine_optimizer": "optimizer" in (self.deepspeed or {}),
        }


def is_true(value: object) -> bool:
    """A switch, written as a bool or as YAML, JSON and environment variables write one (accelerate's str_to_bool)."""
    return str(value).lower() in ("true", "1", "yes", "y", "on", "t")


def keeps_gathered(reshards: object) -> bool:
    """Whether a value of reshard_after_forward, which under FSDP1 is a sharding strategy, leaves weights gathered."""
    name = str(getattr(reshards, "name", reshards)).lower()
    return name in ("false", "0", "no", "n", "off", "f", "shard_grad_op")


def deepspeed_strategy(config: Mapping[str, Any]) -> str:
    """The strategy's name for a DeepSpeed configuration: zero2, zero3_offload_nvme, zero3_plus_plus, …"""
    zero = config.get("zero_optimization") or {}
    name = f"zero{zero.get('stage', 0)}"
    if zero.get("zero_quantized_weights"):
        return f"{name}_plus_plus"
    device = _offload(config)
    return name if device == "none" else f"{name}_offload_{device}"


def _offload(config: Mapping[str, Any]) -> str:
    zero = config.get("zero_optimization") or {}
    return (zero.get("offload_optimizer") or {}).get("device") or "none"


def split_strategy(strategy: str) -> tuple[str, str]:
    """A strategy's engine and where its optimizer states are: zero3_offload_cpu -> (zero3, cpu), tp8 -> (tp, none)."""
    if is_mesh(strategy):
        return "tp" if strategy.startswith("tp") else "hsdp", "none"
    engine, _, offload = strategy.partition("_offload_")
    return engine.removesuffix("_plus_plus"), offload or "none"


def shipped_deepspeed(name: str) -> Path | None:
    """The shipped DeepSpeed JSON of that name; None where there is none."""
    path = shipped("accelerate_configs") / "deepspeed" / f"{name}.json"
    return path if path.is_file() else None


def deepspeed_config(given: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """A DeepSpeed configuration from itself, its JSON, that in base64, a file, or a shipped file's name (zero2, …).

    Raises:
        InputError: there is no such file or name, it is not JSON, or DeepSpeed cannot read a value of it.
    """
    if isinstance(given, Mapping) or given_as_json(given) or os.path.isfile(given):  # Path.is_file: not of a long text
        return check_deepspeed(read_settings(given, "deepspeed"))
    if (inline := decode_inline(str(given))) is not None:
        return check_deepspeed(inline)
    if file := shipped_deepspeed(str(given)):
        return read_json(file)
    if "/" not in str(given) and not str(given).endswith(".json"):
        names = (path.stem for path in (shipped("accelerate_configs") / "deepspeed").glob("*.json"))
        raise choose("deepspeed configuration", str(given), names)
    return check_deepspeed(read_json(given))


def read_settings(given: Mapping[str, Any] | str | Path, field: str) -> Mapping[str, Any]:
    """A field of TrainingArguments that may be a dict, its JSON (as on a command line) or a file's path."""
    if isinstance(given, Mapping):
        return given
    if not given_as_json(given):
        return read_json(given)
    with as_input_error(field, ValueError):
        return json.loads(given)


def missing_batch_size(config: Mapping[str, Any]) -> str | None:
    """What to add where a DeepSpeed configuration has no batch size, which DeepSpeed refuses; None where it has."""
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


def given_as_json(given: Any) -> bool:
    """Whether transformers would read a field as JSON instead of as a path."""
    return isinstance(given, str) and given.startswith("{")


def refuse_differing(engines: list[Engine]) -> None:
    """Refuse a second engine beside the first: only one of them can run.

    Raises:
        InputError: two sources ask for engines that differ.
    """
    for other in engines[1:]:
        if (other.name, other.offload) != (engines[0].name, engines[0].offload):
            raise InputError(
                f"{engines[0].source} asks for {engines[0].label} and {other.source} for {other.label}: "
                "leave one of the two out"
            )


def read_fsdp_version(settings: Mapping[str, Any]) -> int:
    """The `version` of an fsdp_config: 1 or 2, TrainingArguments' default (transformers 5.23, `_process_fsdp_args`).

    Raises:
        InputError: any other.
    """
    version = settings.get("version", 2)
    if str(version) not in ("1", "2"):
        raise InputError(f"fsdp_config.version={brief(version)} must be 1 or 2")
    return int(version)
