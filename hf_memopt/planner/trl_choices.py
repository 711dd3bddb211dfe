"""Choices of plans of TRL's tasks beside the settings of every job: the reference model's part, how the
completions of a step are generated, and vLLM's share of the card.

No step of generation is traced here: estimator.timing.generation_time says how long one takes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, lcm
from typing import Any

from hf_memopt.engines import engine_named
from hf_memopt.errors import InputError
from hf_memopt.estimator.colocation import OWN_MEMORY, cache_bytes, colocates
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.trl_tasks import TRL_TASKS, TrlTask
from hf_memopt.job.spec import JobSpec
from hf_memopt.presets.batch import EFFECTIVE_BATCH
from hf_memopt.presets.trl_configs import DEFAULTS
from hf_memopt.units import gib

_NOT_CHANGES = ("padding_free", "use_liger_kernel")  # that others propose, and TRL 1.16's trainers gain nothing from
_MOST_GENERATIONS = 8  # of an optimizer step
_WAVES = (1, 2, 4, 8)  # in which vLLM writes the completions of a generation batch
_STEP, _LARGEST = 0.05, 0.9  # of shares; 0.9 is vLLM's own default, for a card of its own
_ROUNDED_DOWN = 1e-9  # of a share: floating-point noise must not cost a whole _STEP


@dataclass(frozen=True)
class TrlChoice:
    """TRL's part of a Choice.

    Attributes:
        reference: a reference model is beside the trained one.
        precomputed: its log-probabilities are computed before training instead.
        steps_per_generation: micro-batches that are generated at once; None for trainers that do not generate.
        generations: of an optimizer step.
        share: vllm_gpu_memory_utilization; None without vLLM on the card, and where it is not yet chosen.
        waves: in which vLLM writes a generation batch, whose cache does not fit its share at once.
        sleeps: vLLM's weights and cache are freed while the model trains.
    """

    reference: bool = False
    precomputed: bool = False
    steps_per_generation: int | None = None
    generations: int = 0
    share: float | None = None
    waves: int = 1
    sleeps: bool = False

    @property
    def levers(self) -> int:
        """The number of its switches that are on."""
        return self.precomputed + self.sleeps

    def fields(self) -> dict[str, Any]:
        """The fields of TRL's configuration that it sets."""
        fields: dict[str, Any] = {}
        if self.precomputed:
            fields["precompute_ref_log_probs"] = True
        if self.steps_per_generation is not None:
            fields["steps_per_generation"] = self.steps_per_generation
        if self.share is not None:
            fields |= {"vllm_gpu_memory_utilization": self.share, "vllm_enable_sleep_mode": self.sleeps}
        return fields

    def summary(self) -> list[str]:
        """Its parts of a choice in one line."""
        parts = ["reference precomputed"] if self.precomputed else []
        if self.generations > 1:
            parts.append(f"{self.generations} generations a step")
        if self.share is not None:
            parts.append(f"vLLM {self.share:.2f}" + (", asleep in training" if self.sleeps else ""))
        return parts

    def families(self) -> list[str]:
        """Kinds of settings that a plan names where it chose none of them."""
        kinds = (
            ("reference model beside the trained one", self.reference),
            ("all completions of a step generated at once", self.generations == 1 and self.waves == 1),
            ("vLLM awake in training", self.share is not None and not self.sleeps),
        )
        return [name for name, on in kinds if on]


NO_TRL = TrlChoice()  # of other tasks


@dataclass(frozen=True, kw_only=True)
class TrlSpace:
    """The settings that TRL's trainer of a task leaves open.

    Attributes:
        task: of TRL_TASKS.
        method: full, lora or qlora.
        devices: of the plan.
        fixed: the user's fields of the task's configuration, which stay.
    """

    task: str
    method: str
    devices: int
    fixed: dict[str, Any]

    @property
    def row(self) -> TrlTask:
        """The task's row."""
        return TRL_TASKS[self.task]

    def setting(self, name: str) -> Any:
        """The user's value of a field, else TRL's default."""
        return self.fixed.get(name, getattr(self.row.config_class, name, None))

    @property
    def keeps_reference(self) -> bool:
        """True if a reference model is beside the trained one, unless its part is computed before."""
        needed = self.setting("beta") if self.row.generates else self.row.reference
        return bool(needed) and self.method == "full"

    @property
    def fewest_samples(self) -> int:
        """Of a micro-batch: KTO's KL term pairs each prompt with another's answer (trl 1.16, KTOTrainer)."""
        return 2 if self.task == "kto" else 1

    def choices(self, strategy: str, micro_batch: int, accumulation: int) -> Iterator[TrlChoice]:
        """TRL's part of the choices with a micro-batch."""
        if micro_batch < self.fewest_samples or self.refused(strategy):
            return
        if not self.row.generates:
            for precomputed in self._precomputed(strategy):
                computed_beside = self.keeps_reference and not self.fixed.get("precompute_ref_log_probs")
                yield TrlChoice(reference=computed_beside and not precomputed, precomputed=precomputed)
            return
        for steps in self._steps(micro_batch, accumulation):
            yield TrlChoice(steps_per_generation=steps, generations=max(1, accumulation // steps))

    def refused(self, strategy: str) -> str | None:
        """The reason that a strategy cannot be planned, as estimator.trainer_job refuses it; None where it can."""
        if self.row.generates and engine_named(strategy).gathers_to_generate:
            return f"what {self.row.trainer} gathers to generate is not modelled: plan it with ddp, zero2 or fsdp2"
        precomputes = not self.row.generates and self.fixed.get("precompute_ref_log_probs", True)
        if engine_named(strategy).shards_weights and self.keeps_reference and not precomputes:
            remedy = "set beta=0" if self.row.generates else "set precompute_ref_log_probs=true"
            return f"a reference model beside a sharded one is not modelled: {remedy}, or plan it with ddp or zero2"
        return None

    def _precomputed(self, strategy: str) -> list[bool]:
        if not self.keeps_reference or self.fixed.get("precompute_ref_log_probs"):
            return [False]
        if engine_named(strategy).shards_weights:
            return [True]
        return [False] if "precompute_ref_log_probs" in self.fixed else [False, True]

    def _steps(self, micro_batch: int, accumulation: int) -> list[int]:
        """Micro-batches that may be generated at once: whole groups, and whole generations in an optimizer step."""
        group, samples = self.setting("num_generations"), micro_batch * self.devices
        if batch := self.fixed.get("generation_batch_size"):
            return [] if batch % samples else [batch // samples]
        if steps := self.fixed.get("steps_per_generation"):
            return [] if steps * samples % group else [steps]
        counts = [1] if self.fixed.get("use_vllm") else range(1, _MOST_GENERATIONS + 1)  # its cache has its share
        steps = [accumulation // count for count in counts if accumulation % count == 0]
        return [count for count in steps if count * samples % group == 0]

    def with_shares(self, choice, job: Job, weights: int) -> Iterator[Any]:
        """A Choice with the shares of the card that vLLM may take: for the cache of all completions of a generation
        batch, of half of them, ….

        Args:
            job: of the plan's model, for the tokens of a sample.
            weights: bytes of vLLM's copy of them.
        """
        completions = choice.micro_batch * choice.trl.steps_per_generation
        seen = set()
        for waves in _WAVES:
            cache = ceil(completions / waves) * job.seq_len * cache_bytes(job.config)
            share = OWN_MEMORY * (weights + cache) / job.device.memory
            share = round(ceil(share / _STEP - _ROUNDED_DOWN) * _STEP, 2)
            if fixed := self.fixed.get("vllm_gpu_memory_utilization"):
                own = fixed * job.device.memory / OWN_MEMORY - weights
                waves, share = max(1, ceil((cache * waves) / own)) if own > 0 else 1, fixed
            if share in seen or share > max(_LARGEST, fixed or 0):
                continue
            seen.add(share)
            name = "vllm_enable_sleep_mode"
            for sleeps in [bool(self.fixed[name])] if name in self.fixed else [False, True]:
                yield replace(choice, trl=replace(choice.trl, share=share, waves=waves, sleeps=sleeps))

    @property
    def colocates(self) -> bool:
        """True if vLLM shares the card."""
        return self.row.generates and colocates(self.fixed)

    def whole_batch(self, batch: int | None) -> int | None:
        """The samples of a step: whole groups of completions.

        Args:
            batch: the user's.

        Raises:
            InputError: a batch that cuts a group.
        """
        if not self.row.generates:
            return batch
        group = self.setting("num_generations")
        if not isinstance(group, int) or group < 2:
            raise InputError(f"num_generations={group} must be at least 2: advantages compare completions of a prompt")
        if batch is None:
            multiple = lcm(group, self.devices)
            return ceil(EFFECTIVE_BATCH / multiple) * multiple
        if batch % group:
            raise InputError(
                f"effective_batch_size={batch} counts completions and must be a multiple of num_generations={group}"
            )
        return batch

    def left_out(self) -> list[tuple[str, str]]:
        """Fields of TRL that are said to save memory, and why the plan does not set them."""
        return [
            (row.field, row.effect)
            for row in DEFAULTS
            if row.field in _NOT_CHANGES and self.row.config in row.classes and row.field not in self.fixed
        ]

    def notes(self, choice, device) -> list[str]:
        """Notes on how a step's completions are generated and trained, and on what vLLM leaves.

        Args:
            choice: a Choice.
            device: the Hardware.
        """
        part = choice.trl
        if part.steps_per_generation is None:
            return []
        group, micro = self.setting("num_generations"), choice.micro_batch
        completions = micro * choice.accumulation * self.devices
        if micro % group == 0:
            each = "one group each" if micro == group else f"{micro // group} groups each"
        else:
            each = f"a group is split over {ceil(group / micro)} of them"
        generated = micro * part.steps_per_generation * self.devices
        notes = [
            f"a step is {completions} completions, {completions // group} prompts × num_generations={group}: "
            f"generated {generated} at once, trained in micro-batches of {micro}, {choice.accumulation} on each "
            f"device; {each}"
        ]
        if part.share is not None:
            share = part.share * device.memory
            when = (
                "while it generates, which leaves the whole card to the training step"
                if part.sleeps
                else f"all the time, which leaves {gib(int(device.memory - share))} to training"
            )
            held = "all completions" if part.waves == 1 else f"1 of {part.waves} completions"
            notes.append(
                f"vLLM takes {gib(int(share))} of the card {when}; its cache holds {held} of a generation at once, by "
                "arithmetic"
            )
        return notes


def trl_space(spec: JobSpec) -> TrlSpace | None:
    """The space of a settled spec's task; None where it is none of TRL's."""
    if spec.task not in TRL_TASKS:
        return None
    preset = spec.preset
    return TrlSpace(task=spec.task, method=preset.method, devices=preset.processes, fixed=spec.training)


def fewest_samples(spec: JobSpec) -> int:
    """The fewest samples of a micro-batch."""
    space = trl_space(spec)
    return 1 if space is None else space.fewest_samples
