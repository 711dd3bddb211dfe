"""TRL's configuration classes: defaults of theirs that decide memory, and what a preset sets in them."""

import dataclasses
import importlib
from typing import Any

from hf_memopt.errors import InputError, brief, one_line
from hf_memopt.packages import how_to_install, require

_PAIRS = {"DPOConfig", "RewardConfig"}  # a sample is two sequences (trl 1.16, DataCollatorForPreference)


@dataclasses.dataclass(frozen=True)
class Default:
    """A default of TRL that decides memory.

    Attributes:
        field: of the classes in `classes`.
        value: TRL 1.16's default.
        effect: what it costs, and what a preset or the user does about it.
    """

    field: str
    value: Any
    classes: tuple[str, ...]
    effect: str


_ALL = ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig")
_FUSED = ("SFTConfig", "DPOConfig", "KTOConfig")
DEFAULTS = (
    Default("gradient_checkpointing", True, _ALL, "slower where memory is free; the preset decides on checkpointing"),
    Default("bf16", None, _ALL, "true unless fp16 is set, on any device; the preset's precision"),
    Default(
        "model_init_kwargs",
        None,
        _ALL,
        "a model passed by name loads in float32; pass the preset's model_kwargs() here, or the loaded model",
    ),
    Default("max_length", 1024, ("SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig"), "the preset's tokens"),
    Default(
        "precompute_ref_log_probs",
        False,
        ("DPOConfig", "KTOConfig"),
        "without adapters a second copy of the weights stays on the device; true computes its part before training",
    ),
    Default("packing", False, ("SFTConfig",), "short samples are padded to the longest of their micro-batch"),
    Default("padding_free", False, ("SFTConfig",), "true drops padding, with flash attention"),
    Default("padding_free", False, ("DPOConfig",), "true changes nothing: trl 1.16 falls back to padding"),
    Default("loss_type", ["sigmoid"], ("DPOConfig",), "every value but aot, aot_unpaired and sft splits after an OOM"),
    Default(
        "use_liger_kernel",
        False,
        _FUSED,
        "deprecated by TRL, whose own head computes the loss in tiles: no logits of batch × tokens × vocabulary",
    ),
    Default(
        "activation_offloading",
        False,
        (*_FUSED, "RewardConfig"),
        "true ends OOM recovery; activation_offload of MemoryArguments keeps it",
    ),
)


def trl_class(name: str) -> type:
    """One of TRL's classes.

    Args:
        name: as trl exports it, or with the module that does, as in experimental.orpo.ORPOTrainer.

    Raises:
        InputError: TRL is not installed, or cannot be imported.
    """
    require("trl", name)
    try:
        module, _, kind = f"trl.{name}".rpartition(".")
        return getattr(importlib.import_module(module), kind)  # TRL imports its trainers when they are asked for
    except (ImportError, RuntimeError) as error:
        raise InputError(f"trl cannot be imported ({one_line(error)}): {how_to_install('trl')}") from error


def trl_trainer(trainer) -> type | None:
    """The class of TRL that a trainer derives from; None where it derives from none."""
    return next((kind for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), None)


def check_config_class(kind: Any) -> type:
    """A class of TrainingArguments, unchanged; transformers' own for None.

    Raises:
        InputError: something else.
    """
    from transformers import TrainingArguments

    if kind is None:
        return TrainingArguments
    if not (isinstance(kind, type) and issubclass(kind, TrainingArguments)):
        raise InputError(f"config_class={brief(kind)} must be TrainingArguments or a subclass, such as trl.SFTConfig")
    return kind


def sequences_per_sample(kind: type) -> int:
    """Sequences that one sample of a micro-batch adds: two for pairs of answers."""
    return 2 if _PAIRS & {base.__name__ for base in kind.__mro__} else 1


def preset_fields(preset, kind: type) -> dict[str, Any]:
    """The fields in which a preset that is silent means transformers' default, and a subclass has another.

    Args:
        preset: a Preset.
        kind: TrainingArguments or a subclass.
    """
    from transformers import TrainingArguments

    if kind is TrainingArguments or not preset.name:  # plain settings have the defaults of their class
        return {}
    fields = {item.name for item in dataclasses.fields(kind) if item.init}
    silent = {"activation_checkpointing": False, "bf16": False}
    return silent | ({"max_length": preset.seq_len} if "max_length" in fields else {})
