"""JobSpec: a training job as its user describes it, made once by each way in and passed whole.

What a search varies is a copy by dataclasses.replace().
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_memopt.errors import respell
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.levers.arguments import PLAN_PROFILES, MemoryArguments
from hf_memopt.presets import DTYPES, METHODS, Preset
from hf_memopt.presets.named_presets import plain_settings, strategies


@dataclass(frozen=True, kw_only=True)
class Tool:
    """The training tool whose configuration a job is, which has no presets.

    Attributes:
        name: as its users write it.
        expandable: it sets the allocator's expandable segments itself.
        features: settings of a plan that it has keys for.
        autocast_adapter_dtype: adapters are trained in fp32, as peft does by default.
        launched: its launcher says how several devices train, and no key of it does.
        reads: what its configuration would describe with the settings of a plan (planner's Choice.settings) in it.
        keys: those of its configuration that a plan changes, with their values; None takes one out.
    """

    name: str
    expandable: bool = False
    features: frozenset[str] = frozenset()
    autocast_adapter_dtype: bool = True
    launched: bool = False
    reads: Callable[[Mapping[str, Any]], "JobSpec"] | None = None
    keys: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None

    def settings(self, preset: Preset, spec: "JobSpec") -> Preset:
        """A preset's devices with none of its settings, in the precision of a job."""
        fields = {"use_cpu": preset.training.get("use_cpu"), **spec.training}
        kept = {name: fields[name] for name in ("use_cpu", "bf16", "fp16") if fields.get(name)}
        length = plain_settings(preset.hardware).seq_len
        return replace(preset, training=MappingProxyType(kept), seq_len=length, meant_for=f"settings of {self.name}")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job; None stands for what the preset, the device or the model has, and is filled in where the job is settled.

    Attributes:
        model: a bundled architecture's name, hub id, folder, config.json or PretrainedConfig.
        config: the model's configuration; None until it is read.
        sizes: fields of the configuration that differ from the checkpoint's.
        preset: the settings that the job starts from; a plan leaves its engine open with the strategy "none". A name
            until the job is settled.
        hardware: the device, in a plan with a number of devices (rtx_4090x2).
        method: full, lora or qlora; any lets a plan choose.
        strategy: how several devices train together.
        world_size: processes, one device each.
        sequence_parallel: devices that share the tokens of each sample.
        seq_len: tokens of a sample.
        effective_batch_size: samples of an optimizer step over all devices.
        memory: bytes of each device that may be used.
        host_memory: what one process may use on the host.
        training, lora, quantization: fields of TrainingArguments (of a TRL task its configuration's), LoraConfig and
            BitsAndBytesConfig that the user set: no search changes them.
        memory_args: the user's MemoryArguments; None for a plain Trainer.
        named: those of its fields that the user set, be it to their defaults.
        dtype: of the loaded weights.
        task: what the model is trained for.
        kbit_preparation, padded, packed, attn_implementation: as estimate() takes them.
        clips: settings of a video model's clips, until they are settled to `video` and `frozen`.
        video: the clips of a sample.
        frozen: parts of a video model that are not trained.
        dataset: that the launch command trains on, as its user writes it.
        ignore_columns: of the data, which are not looked at.
        skip_bad_rows: it leaves out rows that cannot be trained on.
        streaming: a plan may keep frozen weights in host memory.
        quick: a plan answers by its sketches.
        tool: whose configuration it was read from; what that leaves out, TrainingArguments decide, and no preset.
    """

    model: Any
    config: Any = None
    sizes: dict[str, Any] = field(default_factory=dict)
    preset: str | Preset | None = None
    hardware: str | Hardware | Preset | None = None
    method: str = "full"
    strategy: str | None = None
    world_size: int | None = None
    sequence_parallel: int = 1
    seq_len: int | None = None
    effective_batch_size: int | None = None
    memory: int | None = None
    host_memory: HostMemory | None = None
    training: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    memory_args: MemoryArguments | None = field(default_factory=MemoryArguments)
    named: frozenset[str] = frozenset()
    dtype: str | None = None
    task: str | None = None
    attn_implementation: str | None = None
    kbit_preparation: bool = False
    padded: bool = False
    packed: bool = False
    clips: dict[str, Any] = field(default_factory=dict)
    video: Any = None
    frozen: tuple[str, ...] = ()
    dataset: str | None = None
    ignore_columns: tuple[str, ...] = ()
    skip_bad_rows: bool = False
    streaming: bool = False
    quick: bool = False
    tool: Tool | None = None

    def __post_init__(self) -> None:
        known = {"method": (*METHODS, "any"), "strategy": strategies(), "dtype": (*DTYPES, "auto")}
        for name, names in known.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, respell(name, value, names))
        if isinstance(self.task, str) and not self.task.startswith("Auto"):  # a class of transformers
            object.__setattr__(self, "task", "-".join(re.split(r"[\s_-]+", self.task.strip().lower())))

    @property
    def model_name(self) -> str:
        """The model as the user wrote it; of a configuration object where it was read, or its type."""
        return str(self.model) if self.is_named else self.config.name_or_path or self.config.model_type

    @property
    def is_named(self) -> bool:
        """True if the model is a name or a path, which a recipe's command line takes, too."""
        return isinstance(self.model, str | Path)

    @property
    def memory_budget(self) -> int:
        """Bytes of each device that the maximum profile of a plan may fill."""
        return int(self.memory * max(share for _, share in PLAN_PROFILES.values()))
