"""What a plan may choose from: every combination of settings that compatibility lets through."""

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from types import MappingProxyType
from typing import Any

from hf_memopt.compatibility.setup import refusals as setup_refusals
from hf_memopt.estimator.tracing.extrapolate import count_layers, layer_period
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.refusals import refusals as lever_refusals
from hf_memopt.levers.selective_checkpointing import period_of
from hf_memopt.presets import Preset
from hf_memopt.presets.preset import with_strategy

CHUNK = 1024  # tokens whose logits are held at once
MOST_SAMPLES = 64  # of a micro-batch; beyond it products are as fast as they get
_SHARES = (0.0, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1.0)
_LONGEST_PERIOD = 4
_SHARES_OF_ENGINES = (0.0, 1 / 2, 1.0)  # whose every estimate takes as long as three of one device's
_FEW_LAYERS = 8  # up to this depth every number of recomputed layers is a choice
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2", "zero2_offload_cpu", "zero3_offload_cpu")


@dataclass(frozen=True)
class Choice:
    """One combination.

    Attributes:
        strategy: as a preset's.
        micro_batch: samples per device and forward pass.
        accumulation: micro-batches per optimizer step.
        recomputed: share of the layers whose activations are recomputed, 0 to 1.
        inputs_offloaded: what recomputed layers keep, their inputs, lies in host memory.
        chunked_loss: logits of CHUNK tokens at once.
        optim: as in TrainingArguments.
        dtype: of the loaded weights.
        compressed: activations in 8 bits.
        activations_offloaded: activations in host memory between forward and backward.
        optimizer_offloaded: optimizer states in host memory, one device.
    """

    strategy: str
    micro_batch: int
    accumulation: int
    recomputed: float
    optim: str
    dtype: str
    inputs_offloaded: bool = False
    chunked_loss: bool = False
    compressed: bool = False
    activations_offloaded: bool = False
    optimizer_offloaded: bool = False

    @property
    def engine(self) -> str:
        """none, ddp, fsdp2 or deepspeed."""
        return "deepspeed" if self.strategy.startswith("zero") else self.strategy

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's; 0 under other engines."""
        return int(self.strategy[4]) if self.engine == "deepspeed" else 0

    @property
    def levers(self) -> int:
        """How many levers are pulled: of equally fast choices the one with fewest is taken."""
        pulled = (
            self.recomputed > 0,
            self.inputs_offloaded,
            self.chunked_loss,
            self.compressed,
            self.activations_offloaded,
            self.optimizer_offloaded,
            "8bit" in self.optim,
        )
        return sum(pulled)

    @property
    def offloads(self) -> int:
        """How many of them count on the host's memory and link."""
        return (
            self.inputs_offloaded
            + self.activations_offloaded
            + self.optimizer_offloaded
            + ("offload" in self.strategy)
        )

    @property
    def approximations(self) -> int:
        """How many of them round what exact training would keep."""
        return self.compressed + ("8bit" in self.optim)

    def memory_fields(self) -> dict[str, Any]:
        """The MemoryArguments fields that it sets."""
        fields: dict[str, Any] = {}
        if self.chunked_loss:
            fields["loss_chunk_size"] = CHUNK
        if self.compressed:
            fields["activation_compression"] = "int8"
        if self.activations_offloaded:
            fields["activation_offload"] = True
        if self.optimizer_offloaded:
            fields["optimizer_cpu_offload"] = True
        if 0 < self.recomputed < 1 and not self._every_n():
            fields["checkpoint_ratio"] = self.recomputed
        return fields

    def _every_n(self) -> int | None:
        """n where every n-th layer is recomputed, which transformers knows itself."""
        number = round(1 / self.recomputed) if self.recomputed else 0
        return number if number > 1 and abs(number * self.recomputed - 1) < 1e-9 else None

    def configured(self, preset: Preset) -> Preset:
        """A preset with the choice's settings."""
        preset = preset if self.strategy == preset.strategy else with_strategy(preset, self.strategy)
        training = {
            name: value for name, value in preset.training.items() if not name.startswith("activation_checkpointing")
        }
        if self.recomputed and self.engine != "fsdp2":
            kwargs: dict[str, Any] = {"use_reentrant": False}
            if number := self._every_n():
                kwargs["every_n_layers"] = number
            if self.inputs_offloaded:
                kwargs["offload"] = True
            training |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
        training["optim"] = self.optim
        if self.compressed or self.activations_offloaded:
            training.pop("torch_compile", None)  # the compiler decides by itself what is saved
        return replace(
            preset,
            micro_batch_size=self.micro_batch,
            dtype=self.dtype,
            training=MappingProxyType(training),
            effective_batch_size=self.micro_batch * self.accumulation * preset.processes,
        )

    def fields(self, preset: Preset, given: dict[str, Any] | None = None) -> dict[str, Any]:
        """The TrainingArguments fields of the configured preset that matter to an estimate."""
        fields: dict[str, Any] = dict(given or {})
        fields |= {"per_device_train_batch_size": self.micro_batch, "gradient_accumulation_steps": self.accumulation}
        if preset.strategy == "fsdp2":
            fields["fsdp_config"] = {"activation_checkpointing": bool(self.recomputed)}
        return fields

    def refused(self, preset: Preset, memory_args: MemoryArguments, given: dict[str, Any]) -> str | None:
        """Why the configured preset cannot run; None where it can."""
        told = setup_refusals(preset.setup())
        if told:
            return told[0]
        fields = {**preset.training, **self.fields(preset, given)}
        return next(lever_refusals(memory_args, fields, self.engine, self.zero_stage), None)


def memory_arguments(given: MemoryArguments, choice: Choice, **profile: Any) -> MemoryArguments:
    """The user's MemoryArguments with the choice's levers."""
    return dataclasses.replace(given, **choice.memory_fields(), **profile)


def choices(
    preset: Preset,
    config,
    effective_batch: int,
    seq_len: int,
    given: MemoryArguments,
    task: str,
    pinned: dict[str, Any],
) -> Iterator[Choice]:
    """Every combination that may run, in no order.

    Args:
        preset: where the search begins; its number of devices is the search's.
        config: the model's.
        effective_batch: samples per optimizer step over all devices.
        given: MemoryArguments of the user's, which stay.
        pinned: TrainingArguments fields of the user's, which stay.
    """
    share = effective_batch // preset.processes
    for strategy in _strategies(preset, pinned):
        for optim, dtype, offloaded in _optimizers(preset, strategy, pinned):
            for micro, (recomputed, inputs), (compressed, moved), chunked in itertools.product(
                _micro_batches(share, pinned),
                _checkpointing(preset, strategy, config, given, pinned),
                _kept(preset, strategy, given),
                _losses(given, task, seq_len),
            ):
                if inputs and (compressed or moved):
                    continue  # both would take the layers' inputs
                choice = Choice(
                    strategy,
                    micro,
                    share // micro,
                    recomputed,
                    optim,
                    dtype,
                    inputs,
                    chunked,
                    compressed,
                    moved,
                    offloaded,
                )
                configured = choice.configured(preset)
                if choice.refused(configured, memory_arguments(given, choice), pinned) is None:
                    yield choice


def _micro_batches(share: int, pinned: dict[str, Any]) -> list[int]:
    if micro := pinned.get("per_device_train_batch_size"):
        return [micro]
    return [micro for micro in range(1, min(share, MOST_SAMPLES) + 1) if share % micro == 0]


def _strategies(preset: Preset, pinned: dict[str, Any]) -> list[str]:
    if preset.processes == 1:
        return ["none"]
    if preset.strategy != "none":
        return [preset.strategy]
    return [name for name in STRATEGIES if preset.hardware.memory_apart or "offload" not in name]


def _checkpointing(preset, strategy: str, config, given: MemoryArguments, pinned) -> list[tuple[float, bool]]:
    """(share of recomputed layers, inputs offloaded)."""
    if "activation_checkpointing" in pinned or given.checkpoint_ratio is not None or given.checkpoint_keeps:
        return [(float(bool(pinned.get("activation_checkpointing", given.checkpoint_ratio or 1))), False)]
    if strategy == "fsdp2":  # accelerate checkpoints every layer that it wraps, or none
        return [(0.0, False), (1.0, False)]
    layers, period = count_layers(config), layer_period(config)
    shares = _SHARES if strategy in ("none", "ddp") else _SHARES_OF_ENGINES
    # An estimate traces whole periods of both patterns, the layers' and the recomputed ones'.
    shares = [share for share in shares if lcm(period, period_of(share)) <= max(period, _LONGEST_PERIOD)]
    if layers <= _FEW_LAYERS:
        shares = [part / layers for part in range(layers + 1)]
    offloads = preset.hardware.memory_apart and not strategy.startswith("zero3")
    return [(share, False) for share in shares] + ([(1.0, True)] if offloads else [])


def _kept(preset, strategy: str, given: MemoryArguments) -> list[tuple[bool, bool]]:
    """(compressed, offloaded) of what is kept between forward and backward."""
    if given.activation_compression or given.activation_offload or strategy.startswith("zero3") or strategy == "fsdp2":
        return [(False, False)]
    return [(False, False), (True, False)] + ([(False, True)] if preset.hardware.memory_apart else [])


def _losses(given: MemoryArguments, task: str, seq_len: int) -> list[bool]:
    if given.loss_chunk_size or given.logits_to_keep or task != "causal-lm" or seq_len <= CHUNK // 4:
        return [False]
    return [False, True]


def _optimizers(preset: Preset, strategy: str, pinned: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """(optim, dtype, states in host memory). Where few weights are trained, states are too few to matter."""
    configured = with_strategy(preset, strategy) if strategy != preset.strategy else preset
    usual, dtype = configured.training.get("optim", "adamw_torch_fused"), configured.dtype
    if "optim" in pinned or preset.method != "full" or "offload" in strategy:
        return [(pinned.get("optim", usual), dtype, False)]
    host_link = preset.hardware.memory_apart
    exact = "adamw_torch" if preset.hardware.backend in ("cpu", "mps") else "adamw_torch_fused"
    found = [(exact, dtype, False), ("adamw_8bit", dtype, False)]
    return found + ([(exact, dtype, True)] if host_link and strategy == "none" else [])
