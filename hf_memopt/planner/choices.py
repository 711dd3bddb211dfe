"""Choices of a plan: every combination of settings that compatibility accepts."""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import lcm
from types import MappingProxyType
from typing import Any

from hf_memopt.engines import Engine, engine_named
from hf_memopt.errors import InputError
from hf_memopt.estimator.job_checks import ulysses_refusal
from hf_memopt.estimator.quantized_checkpoints import engine_refusal, resolve_quantization
from hf_memopt.estimator.spec_job import quantization_config
from hf_memopt.estimator.tracing.extrapolate import count_layers, layer_period
from hf_memopt.estimator.tracing.model import supports_checkpointing
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.estimator.trl_tasks import model_task
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import FEATURES, MemoryArguments
from hf_memopt.levers.changes import ADAM_8BIT
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.feature import Knob
from hf_memopt.levers.features.optimizers import OPTIMIZER_OFFLOAD
from hf_memopt.levers.refusals import WHOLE_SAMPLES
from hf_memopt.levers.selective_checkpointing import period_of
from hf_memopt.packages import is_installed
from hf_memopt.planner.trl_choices import NO_TRL, TrlChoice, trl_space
from hf_memopt.presets import Preset
from hf_memopt.presets.preset import with_strategy
from hf_memopt.stack.versions import EVERY_N_LAYERS, OFFLOADED_INPUTS, stack_has

MOST_SAMPLES = 64  # of a micro-batch; more do not make matmuls faster
_SHARES = (0.0, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 3 / 4, 1.0)  # of the layers, checkpointed
_LONGEST_PERIOD = 4  # layers after which the traced pattern repeats; the model's own may be longer
_SHARES_OF_ENGINES = (0.0, 1 / 2, 1.0)  # fewer: an estimate under an engine takes three times as long
_STREAMED_SHARES = (1 / 4, 1 / 2, 3 / 4, 1.0)  # of the layers
_FEW_LAYERS = 8  # a model of at most so many may checkpoint any number of them
STRATEGIES = ("ddp", "zero2", "zero3", "fsdp2", "zero2_offload_cpu", "zero3_offload_cpu", "fsdp2_offload_cpu")
# Memory features that a plan switches on and off, as their files declare them.
KNOBS: tuple[Knob, ...] = tuple(knob for feature in FEATURES for knob in feature.planned)
ZERO_OFFLOAD = "zero2_offload_cpu"  # stands for every offload of DeepSpeed's on one device


def available_strategies() -> list[str]:
    """The strategies whose package is installed: DeepSpeed is on Linux alone."""
    return [name for name in STRATEGIES if is_installed(engine_named(name).package or "torch")]


@dataclass(frozen=True)
class Choice:
    """One combination.

    Attributes:
        strategy: as a preset's.
        micro_batch: samples per device and forward pass.
        accumulation: micro-batches per optimizer step.
        checkpointed: share of the layers whose activations are checkpointed, 0 to 1.
        inputs_offloaded: the inputs that checkpointed layers keep are in host memory.
        knobs: names of the KNOBS that are on.
        optim: as in TrainingArguments.
        optim_rounds: it is an 8-bit one where the search has an exact one, too (full fine-tuning).
        dtype: of the loaded weights.
        paged: optimizer states leave the device where it has no room for them (full fine-tuning).
        streamed: share of the layers whose frozen weights are in host memory, with the embeddings; 0 without.
        trl: what TRL's trainer of a task adds.
        shared: devices that share each sample.
    """

    strategy: str
    micro_batch: int
    accumulation: int
    checkpointed: float
    optim: str
    dtype: str
    inputs_offloaded: bool = False
    knobs: frozenset[str] = frozenset()
    paged: bool = False
    optim_rounds: bool = False
    streamed: float = 0.0
    trl: TrlChoice = NO_TRL
    shared: int = 1

    @property
    def engine(self) -> Engine:
        return engine_named(self.strategy)

    @property
    def settings(self) -> dict[str, Any]:
        """What it sets that other tools have keys for."""
        return {
            "strategy": self.strategy,
            "training.per_device_train_batch_size": self.micro_batch,
            "training.gradient_accumulation_steps": self.accumulation,
            "training.activation_checkpointing": self.checkpointed > 0,
            "training.optim": self.optim,
            "inputs_offloaded": self.inputs_offloaded,
            **{f"memory.{knob.name}": knob.name in self.knobs for knob in KNOBS},
            **{f"training.{name}": value for name, value in self.trl.fields().items()},
        }

    @property
    def features(self) -> set[str]:
        """The settings that another tool needs a key for (JobSpec.tool)."""
        switches = {
            **self.settings,
            "strategy": False,
            "training.optim": False,
            "memory.checkpoint_ratio": 0 < self.checkpointed < 1,
            "memory.weight_streaming": self.streamed > 0,
            "shared": self.shared > 1,
            f"strategy.{self.strategy}": self.strategy not in ("none", "ddp"),
            f"optim.{self.optim}": True,
        }
        return {name for name, needed in switches.items() if needed}

    @functools.cached_property
    def on(self) -> tuple[Knob, ...]:
        """The knobs that are on, in their order."""
        return tuple(knob for knob in KNOBS if knob.name in self.knobs)

    @property
    def levers(self) -> int:
        """The number of memory features that are on: of equally fast choices the one with fewest is chosen."""
        switches = (
            *(self.checkpointed > 0, self.inputs_offloaded, self.streamed > 0),
            *(self.optim_rounds, self.shared > 1),
        )
        return sum(switches) + len(self.knobs) + self.trl.levers

    @property
    def moves_activations(self) -> bool:
        """True if activations go to host memory and come back."""
        return self.inputs_offloaded or any(knob.moves_activations for knob in self.on)

    @property
    def offloads(self) -> int:
        """The number of them that need host memory and its link to the device."""
        own = self.inputs_offloaded + self.paged + (self.streamed > 0) + self.engine.offloads
        return own + sum(knob.on_host for knob in self.on)

    @property
    def approximations(self) -> int:
        """The number of them that round values that the method keeps exact."""
        return self.optim_rounds + sum(knob.rounds for knob in self.on)

    @property
    def complexities(self) -> int:
        """The cost beside time: using host memory, and every rounding."""
        return bool(self.offloads) + self.approximations

    def memory_fields(self) -> dict[str, Any]:
        """The MemoryArguments fields that it sets."""
        fields = {name: value for knob in self.on for name, value in knob.settings.items()}
        if self.streamed:
            fields |= {"weight_streaming": True, "weight_streaming_ratio": self.streamed}
        if 0 < self.checkpointed < 1 and not self._every_n():
            fields["checkpoint_ratio"] = self.checkpointed
        return fields

    def _every_n(self) -> int | None:
        """n where every n-th layer is checkpointed, which transformers does itself; None for other shares."""
        if not stack_has("transformers", EVERY_N_LAYERS):
            return None
        number = round(1 / self.checkpointed) if self.checkpointed else 0
        return number if number > 1 and abs(number * self.checkpointed - 1) < 1e-9 else None

    def configured(self, preset: Preset) -> Preset:
        """A preset with the choice's settings."""
        preset = preset if self.strategy == preset.strategy else with_strategy(preset, self.strategy)
        training = {
            name: value for name, value in preset.training.items() if not name.startswith("activation_checkpointing")
        }
        if self.checkpointed and not self.engine.checkpointing:
            kwargs: dict[str, Any] = {"use_reentrant": False}
            if number := self._every_n():
                kwargs["every_n_layers"] = number
            if self.inputs_offloaded:
                kwargs["offload"] = True
            training |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
        training["optim"] = self.optim
        # The compiler itself decides which activations are kept, and needs the weights in place.
        if self.streamed or any(knob.group == "activations" for knob in self.on):
            training.pop("torch_compile", None)
        return replace(
            preset,
            micro_batch_size=self.micro_batch,
            dtype=self.dtype,
            training=MappingProxyType(training),
            effective_batch_size=self.micro_batch * self.accumulation * preset.processes // self.shared,
            sequence_parallel=self.shared,
        )

    def fields(self, preset: Preset, fixed: dict[str, Any] | None = None) -> dict[str, Any]:
        """The TrainingArguments fields of the configured preset that matter to an estimate."""
        fields: dict[str, Any] = dict(fixed or {})
        fields |= {"per_device_train_batch_size": self.micro_batch, "gradient_accumulation_steps": self.accumulation}
        fields |= self.trl.fields()
        if "steps_per_generation" in fields:  # TRL refuses it beside the batch that follows from it
            fields.pop("generation_batch_size", None)
        if preset.engine.fsdp_version:
            fields["fsdp_config"] = {"activation_checkpointing": bool(self.checkpointed)}
        return fields

    def refused(self, preset: Preset, memory_args: MemoryArguments, fixed: dict[str, Any]) -> str | None:
        """The reason that the configured preset cannot run; None where it can."""
        fields = {**preset.training, **self.fields(preset, fixed)}
        facts = Facts(setup=preset.setup(), training=fields, memory_args=memory_args)
        return next(iter(facts.refusals()), None)


def memory_arguments(memory_args: MemoryArguments, choice: Choice, **profile: Any) -> MemoryArguments:
    """The user's MemoryArguments with the choice's memory features."""
    return replace(memory_args, **choice.memory_fields(), **profile)


def sharing_counts(spec: JobSpec) -> list[int]:
    """Numbers of devices of one machine that may share each sample (DeepSpeed's Ulysses), where it is longer than the
    preset's and the batch is left open.

    Args:
        spec: with its preset.
    """
    preset, length = spec.preset, spec.seq_len or 0
    sharded = preset.engine.zero_stage or (preset.strategy == "none" and is_installed("deepspeed"))
    fixed = spec.training.get("per_device_train_batch_size", 1) > 1 or "gradient_accumulation_steps" in spec.training
    text = (spec.task or infer_task(spec.config)) == "causal-lm" and spec.video is None
    whole = {*WHOLE_SAMPLES, "sliding_window"} & spec.memory_args.levers().keys() or spec.padded or spec.packed
    own = preset.method == "qlora" or spec.attn_implementation not in (None, "sdpa")
    takes = spec.tool is None or "shared" in spec.tool.features
    if not (sharded and text and takes) or fixed or whole or own or length <= preset.seq_len:
        return []
    devices, attention = preset.processes // preset.machines, spec.attn_implementation
    counts = [n for n in range(2, devices + 1) if devices % n == 0]
    return [n for n in counts if ulysses_refusal(spec.config, n, length, attention) is None]


def list_choices(spec: JobSpec) -> list[Choice]:
    """Every combination of settings that compatibility accepts for a settled spec."""
    return list(SearchSpace(spec).choices())


@dataclass(frozen=True)
class SearchSpace:
    """The settings of a settled spec that a plan may vary: its number of devices and what the user set stay."""

    spec: JobSpec

    def choices(self) -> Iterator[Choice]:
        """Every combination that compatibility accepts, in no order."""
        streamed_shares = self._in_whole_periods(_STREAMED_SHARES) if self.spec.streaming else [0.0]
        for strategy in self._strategies():
            layers = self._checkpointing(strategy)
            for optimizer in self._optimizers(strategy):
                own = optimizer.pop("knobs", frozenset())
                for (shared, micro, accumulation), (checkpointed, inputs), knobs, streamed in itertools.product(
                    self._batches(strategy), layers, self._knobs(strategy), streamed_shares
                ):
                    if inputs and not knobs.isdisjoint(("activation_compression", "activation_offload")):
                        continue  # both would take the layers' inputs
                    if "activation_offload" in knobs and checkpointed == 1 and (1.0, True) in layers:
                        continue  # it holds the inputs that backward has fetched until its end
                    choice = Choice(
                        strategy=strategy,
                        micro_batch=micro,
                        accumulation=accumulation,
                        checkpointed=checkpointed,
                        inputs_offloaded=inputs,
                        knobs=knobs | own,
                        streamed=streamed,
                        shared=shared,
                        **optimizer,
                    )
                    configured = choice.configured(self.spec.preset)
                    memory_args = memory_arguments(self.spec.memory_args, choice)
                    if choice.refused(configured, memory_args, self.spec.training) is None:
                        yield from self._of_trl(choice)

    def _of_trl(self, choice: Choice) -> Iterator[Choice]:
        """The choice with all that TRL's trainer of the task leaves open, and of a job that is another tool's
        configuration what that tool has keys for."""
        space, tool = trl_space(self.spec), self.spec.tool
        own = {f"optim.{self.spec.training.get('optim')}"}  # the user's, which the file has a word for
        parts = space.choices(choice.strategy, choice.micro_batch, choice.accumulation) if space else [NO_TRL]
        for complete in (replace(choice, trl=part) for part in parts):
            if tool is None or complete.features <= tool.features | own:
                yield complete

    @functools.cached_property
    def _task(self) -> str:
        return self.spec.task or infer_task(self.spec.config)

    def _batches(self, strategy: str) -> list[tuple[int, int, int]]:
        """(devices that share a sample, micro-batch, accumulation)."""
        batch, devices = self.spec.effective_batch_size, self.spec.preset.processes
        samples = batch // devices if batch % devices == 0 else 0  # of fewer samples than devices all are shared
        micro = self.spec.training.get("per_device_train_batch_size")
        sizes = [micro] if micro else range(1, min(samples, MOST_SAMPLES) + 1)
        whole = [(1, size, samples // size) for size in sizes if samples and samples % size == 0]
        counts = sharing_counts(self.spec) if engine_named(strategy).zero_stage else []
        return whole + [(n, 1, batch * n // devices) for n in counts if batch * n % devices == 0]

    def _strategies(self) -> list[str]:
        one = self.spec.preset.strategy
        if self.spec.preset.processes == 1 and one == ZERO_OFFLOAD and self.spec.strategy is None:
            return [name for name in available_strategies() if engine_named(name).offloads_alone]
        if self.spec.preset.processes == 1 or one != "none":
            return [one]
        offloads = self.spec.preset.hardware.discrete_memory
        names = [name for name in available_strategies() if offloads or not engine_named(name).offloads]
        asked = quantization_config(self.spec)
        try:
            _, quantization, _ = resolve_quantization(self.spec.config, asked, self.spec.preset.hardware)
        except InputError:  # which is said when the job is described
            return names
        return [name for name in names if not engine_refusal(quantization, engine_named(name))]

    def _checkpointing(self, strategy: str) -> list[tuple[float, bool]]:
        """(share of checkpointed layers, inputs offloaded)."""
        if not supports_checkpointing(self.spec.config, model_task(self._task)):
            return [(0.0, False)]
        fixed, memory_args = self.spec.training, self.spec.memory_args
        ratio = memory_args.checkpoint_ratio
        if "activation_checkpointing" in fixed or ratio is not None or memory_args.checkpoint_keeps:
            return [(float(bool(fixed.get("activation_checkpointing", ratio or 1))), False)]
        engine = engine_named(strategy)
        if engine.checkpointing:  # accelerate checkpoints every layer that it wraps, or none
            return [(0.0, False), (1.0, False)]
        layers = count_layers(self.spec.config)
        shares = _SHARES if engine.plain and not self.spec.streaming else _SHARES_OF_ENGINES
        shares = self._in_whole_periods(shares)
        if layers <= _FEW_LAYERS and not self.spec.streaming:
            shares = [part / layers for part in range(layers + 1)]
        offloads = self.spec.preset.hardware.discrete_memory and engine.zero_stage != 3
        offloads = offloads and stack_has("transformers", OFFLOADED_INPUTS)
        return [(share, False) for share in shares] + ([(1.0, True)] if offloads else [])

    def _knobs(self, strategy: str) -> list[frozenset[str]]:
        """The names of knobs that go together, of those that the job lets a plan switch."""
        groups: dict[str, list[frozenset[str]]] = {}
        for knob in KNOBS:
            if knob.offered and knob.offered(self.spec, self._task, engine_named(strategy)):
                groups.setdefault(knob.group or knob.name, [frozenset()]).append(frozenset({knob.name}))
        return [frozenset().union(*names) for names in itertools.product(*reversed(groups.values()))]

    def _in_whole_periods(self, shares: tuple[float, ...]) -> list[float]:
        """Those of which an estimate traces whole periods of both patterns: the layers' and the share's."""
        period = layer_period(self.spec.config)
        return [share for share in shares if lcm(period, period_of(share)) <= max(period, _LONGEST_PERIOD)]

    def _optimizers(self, strategy: str) -> list[dict[str, Any]]:
        """The fields of a Choice about the optimizer. Adapters have too few states for these to matter."""
        preset = self.spec.preset
        configured = with_strategy(preset, strategy) if strategy != preset.strategy else preset
        default, dtype = configured.training.get("optim", "adamw_torch_fused"), configured.dtype
        own = str(self.spec.training.get("optim", ""))
        if preset.method != "full" or engine_named(strategy).offloads:
            return [{"optim": own or default, "dtype": dtype}]
        discrete = preset.hardware.discrete_memory
        pages = preset.hardware.backend == "cuda" and discrete
        exact = "adamw_torch" if preset.hardware.backend in ("cpu", "mps") else "adamw_torch_fused"
        job = Facts(setup=configured.setup(optim=exact), discrete_memory=discrete)
        kinds: list[dict[str, Any]] = [{"optim": exact}]
        if own:
            kinds = [{"optim": own, "paged": pages and own.startswith("paged")}]
        elif eight_bit := ADAM_8BIT.settings_for(job):
            kinds.append({"optim": eight_bit["optim"], "optim_rounds": True})
            kinds += [{"optim": f"paged_{eight_bit['optim']}", "optim_rounds": True, "paged": True}] * pages
        in_backward = [
            {**kind, "knobs": frozenset({"optimizer_in_backward"})} for kind in kinds if "adamw" in kind["optim"]
        ]
        if OPTIMIZER_OFFLOAD.settings_for(job) and not own:
            kinds.append({"optim": exact, "knobs": frozenset({"optimizer_cpu_offload"})})
        return [{**kind, "dtype": dtype} for kind in kinds + in_backward * self.steps_in_backward]

    @property
    def steps_in_backward(self) -> bool:
        """True if the job lets optimizer_in_backward update its weights: no choice makes up for clipping."""
        spec = self.spec
        unclipped = spec.training.get("max_grad_norm", 1.0) == 0 and not spec.memory_args.optimizer_in_backward
        return unclipped and spec.preset.processes == spec.training.get("gradient_accumulation_steps", 1) == 1
