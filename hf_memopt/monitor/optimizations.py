"""The memory optimizations that a configuration switches on, and the settings with each switched over.

A configuration is TrainingArguments, a DeepSpeed JSON, or a YAML of older guides: nested sections with keys like
`use_flash_attention` and `zero_stage`, which become Hugging Face's here.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.compatibility.resolve import resolve_engine
from hf_memopt.engines import Engine
from hf_memopt.engines.deepspeed import deepspeed_config
from hf_memopt.engines.engine import is_true
from hf_memopt.errors import InputError, choose

CHECKPOINTING = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
_CHECKPOINTING_NAMES = ("activation_checkpointing", "gradient_checkpointing", "deepspeed_activation_checkpointing")
_OFFLOADING_NAMES = ("cpu_offload", "enable_cpu_offload", "nvme_offload", "offload_optimizer", "optimizer_cpu_offload")
_PRECISIONS = ("no", "fp32", "fp16", "bf16", "fp8")
_SAME_NAME = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "optim"),
    *("torch_compile", "use_liger_kernel", "fsdp", "fsdp_config"),
)
_BATCH = "per_device_train_batch_size"
_OTHER_NAME = {"batch_size": _BATCH, "micro_batch_size": _BATCH, "optimizer": "optim"}
_WHOLE = ("zero_optimization", "fsdp_config", "offload_optimizer")  # sections that are one value


@dataclass(frozen=True)
class Settings:
    """Attributes:
    fields: TrainingArguments fields; `deepspeed` is a dict.
    attention: attn_implementation; None for transformers' own choice, which is sdpa.
    """

    fields: dict[str, Any]
    attention: str | None = None

    @property
    def engine(self) -> Engine:
        return resolve_engine(self.fields)

    def changed(self, **fields: Any) -> "Settings":
        """The settings with other fields; None takes one out."""
        merged = {name: value for name, value in (self.fields | fields).items() if value is not None}
        return replace(self, fields=merged)


def read_settings(config) -> Settings:
    """The settings of a configuration that concern memory; others are ignored.

    Args:
        config: TrainingArguments, a dict of its fields, a DeepSpeed configuration, or nested sections.

    Raises:
        InputError: a precision or ZeRO stage that does not exist.
    """
    from hf_memopt.estimator.training_fields import read_fields

    if not isinstance(config, Mapping):
        return Settings(read_fields(config))
    leaves = list(_leaves(config))
    values = dict(leaves)
    fields = {
        _OTHER_NAME.get(name, name): value
        for name, value in leaves
        if name in _SAME_NAME or (name in _OTHER_NAME and isinstance(value, str | int))
    }
    fields |= dict.fromkeys(_precisions(values), True)
    if any(is_true(value) for name, value in leaves if name in _CHECKPOINTING_NAMES):
        fields |= CHECKPOINTING
    if deepspeed := _deepspeed(values):
        fields["deepspeed"] = deepspeed
    return Settings(fields, _attention(values))


def _leaves(config: Mapping) -> Iterator[tuple[str, Any]]:
    """Names and values of all sections; `name: {"enabled": …}`, as DeepSpeed writes it, also as `name` itself."""
    for name, value in config.items():
        if isinstance(value, Mapping) and name not in _WHOLE:
            if "enabled" in value:
                yield name, value["enabled"]
            yield from _leaves(value)
        else:
            yield name, value


def _precisions(values: dict[str, Any]) -> Iterator[str]:
    named = str(values.get("mixed_precision", "no"))
    if named not in _PRECISIONS:
        raise choose("mixed_precision", named, _PRECISIONS)
    for name in ("bf16", "fp16"):
        if is_true(values.get(name)) or named == name:
            yield name
            return  # guides write `mixed_precision: fp16` and `fp16: true` together


def _deepspeed(values: dict[str, Any]) -> dict[str, Any] | None:
    """DeepSpeed's configuration; None without ZeRO."""
    if isinstance(values.get("deepspeed"), str):
        return dict(deepspeed_config(values["deepspeed"]))
    offloads = any(is_true(values.get(name)) for name in _OFFLOADING_NAMES)
    stage = values.get("zero_stage", 2 if offloads else 0)
    if zero := values.get("zero_optimization"):
        return {**deepspeed_config("zero2"), "zero_optimization": zero}
    if stage not in (0, 1, 2, 3):
        raise choose("zero_stage", str(stage), ("0", "1", "2", "3"))
    return _zero(stage, offloads) if stage and is_true(values.get("use_deepspeed", True)) else None


def _zero(stage: int, offloads: bool) -> dict[str, Any]:
    """The shipped JSON of a stage, with optimizer states in host memory or without."""
    config = dict(deepspeed_config(f"zero{stage}"))
    if offloads:
        config["zero_optimization"] = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    return config


def _attention(values: dict[str, Any]) -> str | None:
    if named := values.get("attn_implementation"):
        return named
    if "use_flash_attention" in values:
        return "sdpa" if is_true(values["use_flash_attention"]) else "eager"
    return "sdpa" if values.get("attention_type") == "flash" else None


@dataclass(frozen=True)
class Optimization:
    """Attributes:
    is_on: whether settings have it.
    switch_off, switch_on: the settings without it, and with it.
    """

    is_on: Callable[[Settings], bool]
    switch_off: Callable[[Settings], Settings]
    switch_on: Callable[[Settings], Settings]


def _stage(settings: Settings) -> int:
    """The ZeRO stage to offload with: the current one, 3 for FSDP2, which shards as much, else 2."""
    return settings.engine.zero_stage or (3 if settings.engine.shards_states else 2)


OPTIMIZATIONS = {
    "activation_checkpointing": Optimization(
        lambda settings: bool(settings.fields.get("activation_checkpointing")),
        lambda settings: settings.changed(**dict.fromkeys(CHECKPOINTING)),
        lambda settings: settings.changed(**CHECKPOINTING),
    ),
    "flash_attention": Optimization(  # sdpa is torch's own flash attention kernel
        lambda settings: settings.attention != "eager",
        lambda settings: replace(settings, attention="eager"),
        lambda settings: replace(settings, attention="sdpa"),
    ),
    "mixed_precision": Optimization(
        lambda settings: bool(settings.fields.get("bf16") or settings.fields.get("fp16")),
        lambda settings: settings.changed(bf16=None, fp16=None),
        lambda settings: settings.changed(bf16=True),
    ),
    "8bit_optimizer": Optimization(
        lambda settings: "8bit" in str(settings.fields.get("optim")),
        lambda settings: settings.changed(optim="adamw_torch_fused"),
        lambda settings: settings.changed(optim="adamw_8bit"),
    ),
    "zero": Optimization(
        lambda settings: settings.engine.shards_states,
        lambda settings: settings.changed(deepspeed=None, fsdp=None, fsdp_config=None),
        lambda settings: settings.changed(deepspeed=_zero(2, False)),
    ),
    "cpu_offload": Optimization(
        lambda settings: settings.engine.offloads,
        lambda settings: settings.changed(deepspeed=_zero(_stage(settings), False)),
        lambda settings: settings.changed(
            deepspeed=_zero(_stage(settings), True), fsdp=None, fsdp_config=None, optim="adamw_torch"
        ),
    ),
}


def predict_savings(settings: Settings, peak: Callable[[Settings], int]) -> Iterator[dict[str, Any]]:
    """For each of OPTIMIZATIONS the bytes that it saves, or would save, or why that is unknown.

    Args:
        peak: predicts the peak of settings, in bytes.

    Raises:
        InputError: the settings themselves cannot be predicted.
    """
    current = peak(settings)
    for optimization in OPTIMIZATIONS.values():
        on = optimization.is_on(settings)
        try:
            switched = peak(optimization.switch_off(settings) if on else optimization.switch_on(settings))
        except InputError as error:
            yield {"memory_savings": None, "not_predicted": str(error)}
        else:
            yield {"memory_savings": switched - current if on else current - switched}
