"""A preset: named settings in Hugging Face vocabulary, turned into transformers' and peft's objects when asked."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from hf_memopt.compatibility.rules import BITSANDBYTES
from hf_memopt.compatibility.setup import Setup, check
from hf_memopt.engines import Engine, engine_named
from hf_memopt.engines.mesh import Mesh
from hf_memopt.errors import InputError, as_input_error, choose
from hf_memopt.field_values import fit, hints_of
from hf_memopt.hardware.attention_kernels import resolve_attention
from hf_memopt.hardware.catalog import Hardware
from hf_memopt.hardware.detection import counterpart
from hf_memopt.presets.accelerate_config import accelerate_config, inline
from hf_memopt.presets.batch import batch_settings
from hf_memopt.presets.environment import PRECISION, set_for_libraries

METHOD_TITLES = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
METHODS = tuple(METHOD_TITLES)
DTYPES = ("float32", "bfloat16", "float16")
# Of the weights, by precision: fp8 matmuls take 16-bit weights.
_WEIGHT_DTYPES = {"fp8": "bfloat16", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}

_LONG = 2048  # tokens


@dataclass(frozen=True)
class Preset:
    """Settings for one kind of hardware and one method. Building, listing and printing one needs no torch.

    Attributes:
        name, hardware, method: as asked for.
        strategy: none | ddp | fsdp2 | fsdp2_offload_cpu | tpN, hsdpN, tpN_hsdpM (engines.mesh) | a name in
            accelerate_configs/deepspeed.
        processes: the number of devices.
        machines: the number of machines that they are in.
        micro_batch_size: samples per device and forward pass.
        effective_batch_size: micro-batch × accumulation × data-parallel processes, which never changes.
        seq_len: tokens a sample, at most.
        reference_model: hub id of the model that the sizes are meant for.
        meant_for: the sentence that says what the preset trades.
        dtype: of the loaded weights.
        training: TrainingArguments fields, batch settings left out.
        environment: environment variables to set before the accelerator starts.
        sequence_parallel: devices that split each sequence (DeepSpeed's Ulysses, under ZeRO).
    """

    name: str
    hardware: Hardware
    method: str
    strategy: str
    processes: int
    micro_batch_size: int
    effective_batch_size: int
    seq_len: int
    reference_model: str
    meant_for: str
    dtype: str
    training: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    machines: int = 1
    sequence_parallel: int = 1

    @property
    def engine(self) -> Engine:
        return engine_named(self.strategy)

    @property
    def mesh(self) -> Mesh | None:
        """The device mesh of its strategy, where transformers shards the model (tpN, hsdpN)."""
        return self.engine.mesh(self.processes)

    def batches(self, world_size: int) -> int:
        """The data-parallel processes of a world size: tensor- and sequence-parallel ones share a batch.

        Raises:
            InputError: the strategy's sizes do not divide the world size.
        """
        if mesh := self.engine.mesh(world_size):
            return mesh.batches
        if world_size % self.sequence_parallel:
            raise InputError(f"sequence_parallel={self.sequence_parallel} does not divide the {world_size} processes")
        return world_size // self.sequence_parallel

    @property
    def gradient_accumulation_steps(self) -> int:
        """Accumulation on the number of devices that the preset is meant for."""
        return self.effective_batch_size // (self.micro_batch_size * self.batches(self.processes))

    @property
    def precision(self) -> str:
        """fp8, bf16, fp16 or fp32: what the forward and backward passes compute in."""
        if self.environment.get(PRECISION) == "fp8":
            return "fp8"
        return "bf16" if self.training.get("bf16") else "fp16" if self.training.get("fp16") else "fp32"

    def settings(self) -> dict[str, Any]:
        """The TrainingArguments fields it sets, on its own number of devices: what is shown and exported."""
        return {
            "per_device_train_batch_size": self.micro_batch_size,
            "per_device_eval_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            **self.fields,
        }

    @property
    def fields(self) -> dict[str, Any]:
        """Its TrainingArguments fields without the batch: `training`, with less prefetching for long samples."""
        fields = dict(self.training)
        if self.seq_len > _LONG and "dataloader_prefetch_factor" in fields:
            fields["dataloader_prefetch_factor"] = 1
        return fields

    def training_arguments(
        self, output_dir: str = "out", world_size: int | None = None, config_class: type | None = None, **overrides
    ):
        """A transformers.TrainingArguments for this process, or an instance of a subclass of it: trl.SFTConfig, ….

        A subclass gets the preset's precision, activation checkpointing and length (`max_length`) in place of its own
        defaults, and half the micro-batch where a sample is a pair of answers (DPO, reward).

        Accumulation follows from the effective batch and the world size. A micro-batch or accumulation that you
        override is balanced by the other; override both, or `effective_batch_size`, to change the effective batch.

        Args:
            output_dir: where the Trainer writes.
            world_size: number of processes; by default the launcher's WORLD_SIZE, and outside a launcher the number
                of devices that the preset is meant for.
            config_class: by default TrainingArguments.
            overrides: any field of the class, or effective_batch_size.

        Raises:
            InputError: an unknown field, a combination that does not work, or a device that this machine lacks.
        """
        from hf_memopt.presets.training_arguments import build_training_arguments

        return build_training_arguments(self, output_dir, world_size, overrides, config_class)

    def apply_environment(self) -> None:
        """Set its environment variables that the user has not set; training_arguments() does so first of all.

        torch, DeepSpeed and accelerate read them when they start, so they stay set after this call.
        """
        set_for_libraries(self.environment)

    def model_kwargs(self, attn_implementation: str | None = None) -> dict[str, Any]:
        """Arguments for from_pretrained: dtype, attn_implementation and, for QLoRA, quantization_config.

        Args:
            attn_implementation: a name to insist on; by default the best that runs here, which is announced.
        """
        kwargs: dict[str, Any] = {
            "dtype": self.dtype,
            "attn_implementation": resolve_attention(counterpart(self.hardware) or self.hardware, attn_implementation),
        }
        if self.method == "qlora":
            from transformers import BitsAndBytesConfig

            check(self.setup())
            kwargs["quantization_config"] = BitsAndBytesConfig(**self.quantization())
            # By default transformers takes the process's accelerator, where FSDP's whole model need not fit.
            if self.hardware.backend == "cpu" or self.engine.fsdp_version:
                kwargs["device_map"] = {"": "cpu"}
        return kwargs

    def quantization(self) -> dict[str, Any]:
        """QLoRA's BitsAndBytesConfig fields: 4-bit NormalFloat, double quantisation (Dettmers et al. 2023)."""
        return {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": _WEIGHT_DTYPES[self.precision],
            # FSDP shards float tensors only, so the 4-bit weights are stored as one (accelerate.utils.fsdp_utils).
            **({"bnb_4bit_quant_storage": "bfloat16"} if self.engine.fsdp_version else {}),
        }

    def lora(self) -> dict[str, Any]:
        """The LoraConfig fields: every linear layer but the head, as in QLoRA; no dropout, whose masks cost memory."""
        return {
            "r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.0,
            "target_modules": "all-linear",
            "task_type": "CAUSAL_LM",
        }

    def peft_config(self, **overrides):
        """A peft.LoraConfig, or None for full fine-tuning.

        Args:
            overrides: fields of LoraConfig.

        Raises:
            InputError: an unknown field or a value that peft refuses, or overrides without an adapter.
        """
        if self.method == "full":
            if overrides:
                raise InputError("lora.* applies to method=lora only, and to its 4-bit form qlora")
            return None
        from peft import LoraConfig

        hints = hints_of(LoraConfig)
        for key in overrides.keys() - hints.keys():
            raise choose("key of lora", str(key), hints)
        overrides = fit(hints, overrides, "lora.")
        with as_input_error("lora", ValueError, TypeError, KeyError, AttributeError, ImportError):
            return LoraConfig(**{**self.lora(), **overrides})

    def accelerate_config(self, deepspeed_file: str | None = None) -> dict[str, Any]:
        """The content of accelerate_configs/<name>.yaml.

        Args:
            deepspeed_file: path of the DeepSpeed JSON; by default the configuration holds the JSON itself, so that
                its YAML works wherever it is copied.
        """
        deepspeed = self.deepspeed_config()
        return accelerate_config(self, (deepspeed_file or inline(deepspeed)) if deepspeed else "")

    def deepspeed_config(self) -> dict[str, Any] | None:
        """The content of accelerate_configs/deepspeed/<strategy>.json; None without DeepSpeed."""
        return self.engine.shipped_config()

    def setup(self, **changes) -> Setup:
        """The preset in the terms of the compatibility table."""
        return replace(
            Setup(
                **self.engine.setup(),
                optim=self.training.get("optim", "adamw_torch_fused"),
                method=self.method,
                device=self.hardware.backend,
                precision=self.precision,
                dtype=self.dtype,
                native_bf16=self.hardware.native_bf16,
                label=self.hardware.label,
                quant_storage=self.quantization().get("bnb_4bit_quant_storage", "uint8"),
                activation_checkpointing=bool(self.training.get("activation_checkpointing")),
                accumulates=self.gradient_accumulation_steps > 1,
                replicated=self.mesh is not None and self.mesh.dp_replicate_size > 1,
            ),
            **changes,
        )


def with_strategy(preset: Preset, strategy: str) -> Preset:
    """The preset under another engine, with what the engine requires; the batch stays.

    DeepSpeed and FSDP2 keep fp32 master weights themselves, so weights load in the compute dtype; where transformers
    shards a model (tpN, hsdpN), the loaded weights are trained. FSDP2 does its own activation checkpointing. Offloaded
    optimizer states need an optimizer that DeepSpeed has on the CPU, and sharded weights one that supports DTensor.
    """
    engine = engine_named(strategy)
    training = dict(preset.training)
    dtype = preset.dtype
    if engine.checkpointing:
        training.pop("activation_checkpointing", None)
        training.pop("activation_checkpointing_kwargs", None)
    if training.get("optim") in BITSANDBYTES and (engine.dtensor or engine.offloads):
        training["optim"] = "adamw_torch" if engine.offloads and not engine.dtensor else "adamw_torch_fused"
    if engine.shards_states:
        loaded = engine.master_weights or preset.method != "full"
        dtype = _WEIGHT_DTYPES[preset.precision] if loaded else "float32"
        # torch.compile has not been tried under the sharding engines.
        training.pop("torch_compile", None)
    return replace(preset, strategy=strategy, training=MappingProxyType(training), dtype=dtype)


def on_machines(preset: Preset, machines: int) -> Preset:
    """The preset on several machines, each with its devices. The effective batch grows only to a multiple of them.

    Raises:
        InputError: fewer than one machine, or a preset of one device or of several machines already.
    """
    if machines < 1:
        raise InputError(f"machines={machines} must be at least 1")
    if machines > 1 and preset.engine.alone:
        raise InputError(f"preset {preset.name} is for one device: machines={machines} needs a preset of several")
    if preset.machines > 1:
        raise InputError(f"preset {preset.name} is for {preset.machines} machines already: leave machines out")
    devices = preset.processes * machines
    batch = -(-preset.effective_batch_size // devices) * devices
    micro, _ = batch_settings(batch, preset.micro_batch_size, devices)
    return replace(preset, processes=devices, machines=machines, effective_batch_size=batch, micro_batch_size=micro)


def retrained(preset: Preset, **changes: Any) -> Preset:
    """The preset with other TrainingArguments fields; None takes one out."""
    training = {name: value for name, value in {**preset.training, **changes}.items() if value is not None}
    return replace(preset, training=MappingProxyType(training))
