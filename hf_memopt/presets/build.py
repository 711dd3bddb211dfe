"""Build Presets from table.toml: a row's sizes over what every device of its kind gets."""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.presets.preset import METHOD_TITLES, METHODS, Preset, with_strategy
from hf_memopt.presets.reference import reference_row

_CHECKPOINTING = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
}
_LOADER = {
    "dataloader_num_workers": 4,
    "dataloader_prefetch_factor": 2,
    "dataloader_persistent_workers": True,
    "dataloader_pin_memory": True,
}


@dataclass(frozen=True, kw_only=True)
class _Row:
    """An entry of table.toml for one method; the keys are explained there."""

    meant_for: str
    hardware: str
    micro_batch: int
    accumulation: int
    seq_len: int
    model: str = ""
    processes: int = 1
    machines: int = 1
    strategy: str = "none"
    training: Mapping[str, Any] = field(default_factory=dict)


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads((Path(__file__).parent / "table.toml").read_text(encoding="utf-8"))


def preset_names() -> list[str]:
    """The names of all presets, in the table's order."""
    return list(_table())


def build_preset(name: str, method: str, hardware: Hardware | None = None) -> Preset:
    """The preset of a name in the table.

    Args:
        method: full | lora | qlora.
        hardware: a device that gets the row's sizes with its own precision, optimizer and environment; by default the
            row's device.
    """
    row = _Row(**_resolve(name, method))
    hardware = hardware or get_hardware(row.hardware)
    training = {**_device_defaults(hardware, method), **row.training}
    if not training.get("activation_checkpointing"):
        training.pop("activation_checkpointing_kwargs", None)
    preset = Preset(
        name=name,
        hardware=hardware,
        method=method,
        strategy="none",
        processes=row.processes,
        micro_batch_size=row.micro_batch,
        effective_batch_size=row.micro_batch * row.accumulation * row.processes,
        seq_len=row.seq_len,
        reference_model=row.model or reference_row(name, method).get("model", ""),
        meant_for=row.meant_for.strip().replace("{models}", _models(name)),
        dtype=_weights_dtype(training, method),
        training=MappingProxyType(training),
        environment=MappingProxyType(_environment(hardware)),
        machines=row.machines,
    )
    return preset if row.strategy == "none" else with_strategy(preset, row.strategy)


def is_chosen(name: str, method: str) -> bool:
    """True if the table names the reference model: otherwise `make estimates` finds it."""
    return "model" in _resolve(name, method)


def _models(name: str) -> str:
    """The models that a preset is predicted to fit, of every method, in a sentence."""
    texts = []
    for method, title in METHOD_TITLES.items():
        if row := reference_row(name, method):
            text = f"{title} of {_short(row['model'])} at {row['micro_batch']} × {row['seq_len']} tokens"
            larger = row["largest"]
            texts.append(text + (f" (one sample at a time: {_short(larger['model'])})" if larger else ""))
    return f"Predicted to fit: {'; '.join(texts)}." if texts else ""


def _short(model: str) -> str:
    return model.rpartition("/")[2]


def _resolve(name: str, method: str) -> dict[str, Any]:
    """An entry's keys for one method, over its base's."""
    entry = _table()[name]
    base = _resolve(entry["base"], method) if "base" in entry else {"hardware": name}
    shared = {key: value for key, value in entry.items() if key not in (*METHODS, "base")}
    return base | shared | entry.get(method, {})


def _device_defaults(hardware: Hardware, method: str) -> dict[str, Any]:
    if hardware.backend == "cpu":
        return {"use_cpu": True, "optim": "adamw_torch", "dataloader_pin_memory": False}
    precision = "bf16" if hardware.native_bf16 else "fp16"
    training: dict[str, Any] = {**_CHECKPOINTING, "optim": _optimizer(hardware, method), precision: True}
    if hardware.backend == "mps":
        # Unified memory: worker processes and pinned copies would compete with the model.
        return training | {"dataloader_pin_memory": False}
    training |= _LOADER
    if hardware.backend == "cuda":
        capability = hardware.capability
        if capability >= 8.0:
            training["tf32"] = True
        # Hopper and later: enough compute for the compiler to matter, and the memory for its warm-up.
        if capability >= 9.0 and method != "qlora" and hardware.is_large:
            training["torch_compile"] = True
    return training


def _optimizer(hardware: Hardware, method: str) -> str:
    """8-bit states where they matter and work; LoRA's states are too few to matter."""
    if hardware.backend == "mps":
        return "adamw_torch"  # bitsandbytes has no optimizer kernel for MPS
    # bitsandbytes' builds have RDNA 2 (gfx103x) for ROCm 7.14 alone (0.50, docs/source/installation.mdx), and how this
    # machine's ROCm is numbered is not known before torch is imported.
    if method == "lora" or hardware.architecture.startswith("gfx103"):
        return "adamw_torch_fused"
    if method == "qlora":
        return "paged_adamw_8bit" if hardware.backend == "cuda" else "adamw_8bit"
    return "adamw_torch_fused" if hardware.is_large else "adamw_8bit"


def _weights_dtype(training: dict[str, Any], method: str) -> str:
    """fp32 master weights for what is trained in full; frozen weights in the computing dtype.

    Pure bf16 training loses updates smaller than 2**-8 of a weight, and the fp16 gradient scaler needs fp32
    gradients. Adapters are fp32 in either case (peft's autocast_adapter_dtype).
    """
    if method == "full" or not (training.get("bf16") or training.get("fp16")):
        return "float32"
    return "bfloat16" if training.get("bf16") else "float16"


def _environment(hardware: Hardware) -> dict[str, str]:
    if hardware.backend == "cuda":
        return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if hardware.backend == "cpu":
        return {"DS_ACCELERATOR": "cpu"}
    # Run gfx1031 as gfx1030, which ROCm's libraries are built for.
    return {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"} if hardware.architecture == "gfx1031" else {}
