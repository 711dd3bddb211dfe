"""plan(): the fastest settings that fit, for four profiles from safe to maximum."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memopt.errors import InputError, choose
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.overheads import measured_memory
from hf_memopt.estimator.preset_estimates import preset_job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.model import infer_task
from hf_memopt.field_values import fit, hints_of
from hf_memopt.hardware.measured import measured_on
from hf_memopt.levers.arguments import RUNGS, THRESHOLDS, MemoryArguments
from hf_memopt.planner.choices import Choice, SearchSpace, memory_arguments
from hf_memopt.planner.cost import speed_note
from hf_memopt.planner.devices import preset_of
from hf_memopt.planner.nearest import nearest_changes
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.sketch import baselines, sketch_of, traced_jobs
from hf_memopt.presets import METHODS, Preset
from hf_memopt.presets.batch import batch_settings
from hf_memopt.units import GIB, gib

# Host memory for each device by default: 2 TB for eight (NVIDIA DGX A100 and H100 user guides), and of a desktop's
# 64 GiB what its other programs leave.
_DEFAULT_HOST_MEMORY = {True: 256 * GIB, False: 48 * GIB}
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Rung:
    """One profile of a plan, and its settings.

    Attributes:
        name: safe, balanced, aggressive or maximum.
        share: of the device's memory that it may fill.
        choice: the settings that the search varies.
        preset: all settings, as a Preset.
        memory_args: the memory features, and the monitor's thresholds.
        estimate: of exactly these settings.
        relative_speed: predicted, 1.0 for the fastest profile.
    """

    name: str
    share: float
    choice: Choice
    preset: Preset
    memory_args: MemoryArguments
    estimate: Estimate
    relative_speed: float

    @property
    def summary(self) -> str:
        """The settings in one line."""
        return summarize(self.choice)


@dataclass(frozen=True)
class Rejected:
    """Settings that do not fit or work, and why."""

    settings: str
    reason: str


@dataclass(frozen=True)
class Request:
    """What is planned for.

    Attributes:
        preset: the device's, with as many devices as are planned for; strategy "none" leaves the engine open.
        memory: bytes of each device that may be used.
        fields, lora: the user's TrainingArguments and LoraConfig fields, which no choice changes.
        memory_args: the user's MemoryArguments.
        more: further arguments of estimator.job.describe: video, frozen, task, attn_implementation, …
        quantization: makes the BitsAndBytesConfig of a preset; None for the preset's own.
        host_memory: bytes of host memory that one process may use; None where unknown.
    """

    model: Any
    config: Any
    preset: Preset
    memory: int
    seq_len: int
    effective_batch_size: int
    fields: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    memory_args: MemoryArguments = field(default_factory=MemoryArguments)
    more: dict[str, Any] = field(default_factory=dict)
    quantization: Callable[[Preset], Any] | None = None
    host_memory: int | None = None

    @property
    def memory_budget(self) -> int:
        """Bytes of each device that the maximum profile may fill."""
        return int(self.memory * max(share for _, share in RUNGS.values()))

    def job(self, choice: Choice) -> Job:
        """The job of a choice, for the estimator."""
        configured = choice.configured(self.preset)
        more = dict(self.more)
        if self.quantization is not None:
            more["quantization_config"] = self.quantization(configured)
        lora = self.lora if configured.method != "full" else {}
        return preset_job(
            configured,
            self.config,
            seq_len=self.seq_len,
            world_size=configured.processes,
            fields=choice.fields(configured, self.fields),
            lora=lora,
            memory_args=memory_arguments(self.memory_args, choice),
            **more,
        )

    def search(self, say: Callable[[str], None]) -> Search | None:
        """The search over all choices; None where compatibility leaves none."""
        space = SearchSpace(
            preset=self.preset,
            config=self.config,
            effective_batch_size=self.effective_batch_size,
            seq_len=self.seq_len,
            memory_args=self.memory_args,
            task=self.more.get("task") or infer_task(self.config),
            fixed=self.fields,
        )
        choices = list(space.choices())
        if not choices:
            return None
        # Engines compute with 16-bit weights; with others, autocast's copies of 32-bit weights count as activations.
        plain = min(choices, key=lambda choice: (choice.strategy == "ddp", choice.levers))

        def build(samples: int, checkpointed: bool) -> Job:
            choice = replace(plain, micro_batch=samples, accumulation=1, checkpointed=0.0)
            job = self.job(choice)
            checkpointing = {"activation_checkpointing": checkpointed}
            if checkpointed:
                checkpointing["activation_checkpointing_kwargs"] = {"use_reentrant": False}
            dropped = ("activation_checkpointing", "activation_checkpointing_kwargs", "deepspeed", "fsdp_config")
            kept = {name: value for name, value in job.fields.items() if name not in dropped}
            return dataclasses.replace(job, fields={**kept, **checkpointing})

        say(f"tracing {self.preset.method} training with and without activation checkpointing")
        jobs = baselines(build)
        return Search(choices, sketch_of(jobs, traced_jobs(jobs)), self.job, say, self.host_memory)


@dataclass(frozen=True)
class Plan:
    """The profiles that fit, and what was left out.

    Attributes:
        request: with the method that was chosen.
        ladder: the profiles, from safe to maximum; empty where nothing fits.
        rejected: methods and kinds of settings that do not fit, with reasons.
        missing_bytes: where nothing fits, what the smallest settings lack, of the device or else of the host.
        nearest: where nothing fits, changes that would make it fit.
    """

    request: Request
    ladder: list[Rung]
    rejected: list[Rejected]
    missing_bytes: int | None = None
    nearest: list[str] = field(default_factory=list)

    def __iter__(self):
        return iter(self.ladder)

    @property
    def notes(self) -> list[str]:
        """What of the device's memory and speed was measured on it."""
        device = self.request.preset.hardware
        memory = measured_memory(device) if measured_on(device) else ()
        return [*memory, *filter(None, [speed_note(device)])]

    def to_dict(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        from hf_memopt.planner.launch import as_dict

        return {
            "model": str(self.request.model),
            "method": self.request.preset.method,
            "hardware": self.request.preset.hardware.name,
            "devices": self.request.preset.processes,
            "usable_bytes": self.request.memory,
            "usable_host_bytes": self.request.host_memory,
            "effective_batch_size": self.request.effective_batch_size,
            "seq_len": self.request.seq_len,
            "ladder": [as_dict(self.request, rung) for rung in self.ladder],
            "rejected": [dataclasses.asdict(rejected) for rejected in self.rejected],
            "missing_bytes": self.missing_bytes,
            "nearest": self.nearest,
            "notes": self.notes,
        }


def plan(
    model,
    hardware: str | Preset = "auto",
    effective_batch_size: int | None = None,
    seq_len: int | None = None,
    method: str = "any",
    strategy: str | None = None,
    memory: int | None = None,
    training: dict | None = None,
    lora: dict | None = None,
    memory_args: MemoryArguments | None = None,
    quantization=None,
    host_memory: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    **more,
) -> Plan:
    """The fastest settings that are predicted to fit four shares of the device's memory.

    Args:
        model: a bundled architecture's name, hub id, folder, config.json or PretrainedConfig.
        hardware: a preset's name, with a number of devices for several: rtx_4090, rtx_4090x2, h100_80gbx128; or a
            Preset of the method.
        effective_batch_size: samples per optimizer step over all devices; by default the preset's.
        seq_len: tokens per sample; by default the preset's, within the model's positions.
        method: full, lora or qlora; any takes the first of them that fits.
        strategy: how several devices train together; by default the fastest that fits.
        memory: bytes of each device that may be used; by default all of it.
        training, lora: TrainingArguments and LoraConfig fields that the plan keeps.
        memory_args: MemoryArguments that the plan keeps.
        quantization: makes the BitsAndBytesConfig of a preset.
        host_memory: bytes of host memory that one process may use; by default (assumed) 48 GiB, and 256 GiB for a
            device with more than 36 GiB.
        say: called with a line for each thing that takes time.
        more: further arguments of estimator.job.describe: video, frozen, task, attn_implementation, dtype,
            padded, packed.

    Raises:
        InputError: unknown names, or a batch that the devices cannot share.
    """
    if method not in (*METHODS, "any"):
        raise choose("method", method, [*METHODS, "any"])
    if lora and method == "full":
        raise InputError("lora.* applies to method=lora only, and to its 4-bit form qlora")
    question = _Question(
        model=model,
        config=load_config(model),
        hardware=hardware,
        strategy=strategy,
        dtype=more.pop("dtype", None),
        effective_batch_size=effective_batch_size,
        seq_len=seq_len,
        memory=memory,
        fields=training or {},
        lora=lora or {},
        memory_args=memory_args or MemoryArguments(),
        more=more,
        quantization=quantization,
        host_memory=host_memory,
    )
    return _answer(question, METHODS if method == "any" else (method,), say)


def _answer(question: "_Question", methods: tuple[str, ...], say: Callable[[str], None]) -> Plan:
    """The plan of the first method that fits, or what is missing for the last."""
    rejected: list[Rejected] = []
    for method in methods:
        request = question.for_method(method)
        search = request.search(say)
        if rungs := _ladder(request, search) if search else []:
            return Plan(request, rungs, rejected + list(_left_out(request, search, [rung.choice for rung in rungs])))
        least = search.smallest() if search else None
        rejected.append(_too_large(request, search, least))
    if least is None:
        return Plan(request, [], rejected)
    estimate, budget = search.found[least], request.memory_budget
    if estimate.device_bytes <= budget:
        wanted = f"--host-memory {-(-estimate.host_bytes // GIB)}"
        return Plan(request, [], rejected, estimate.host_bytes - request.host_memory, [wanted])
    return Plan(request, [], rejected, estimate.device_bytes - budget, nearest_changes(request, least, say))


@dataclass(frozen=True, kw_only=True)
class _Question:
    """plan()'s arguments, before a method is chosen; None stands for the preset's or the device's."""

    model: Any
    config: Any
    hardware: str | Preset
    strategy: str | None
    dtype: str | None
    effective_batch_size: int | None
    seq_len: int | None
    memory: int | None
    fields: dict[str, Any]
    lora: dict[str, Any]
    memory_args: MemoryArguments
    more: dict[str, Any]
    quantization: Callable[[Preset], Any] | None
    host_memory: int | None

    def for_method(self, method: str) -> Request:
        """The request of one method, checked."""
        from transformers import TrainingArguments

        preset = preset_of(self.hardware, method, self.strategy)
        if self.dtype:
            preset = replace(preset, dtype=self.dtype)
        fields = fit(hints_of(TrainingArguments), self.fields)
        batch, fields = self._batch(preset, fields)
        memory = preset.hardware.memory if self.memory is None else self.memory
        if memory <= 0:
            raise InputError(f"memory={memory} must be above 0 bytes")
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        host_memory = self.host_memory
        if host_memory is None:
            host_memory = _DEFAULT_HOST_MEMORY[preset.hardware.is_large]
        return Request(
            model=self.model,
            config=self.config,
            preset=preset,
            memory=memory,
            seq_len=self.seq_len or min(preset.seq_len, positions or preset.seq_len),
            effective_batch_size=batch,
            fields=fields,
            lora=self.lora,
            memory_args=self.memory_args,
            more=self.more,
            quantization=self.quantization,
            host_memory=host_memory,
        )

    def _batch(self, preset: Preset, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The effective batch, and the fields with both halves of it where the user set one."""
        devices, effective = preset.processes, self.effective_batch_size
        micro, accumulation = (fields.get(name) for name in _BATCH)
        if micro and accumulation and effective is None:
            effective = micro * accumulation * devices
        batch = effective or -(-preset.effective_batch_size // devices) * devices
        if batch < 1 or batch % devices:
            raise InputError(
                f"effective_batch_size={batch} cannot be split over {devices} devices: use a multiple of {devices}"
            )
        if not (micro or accumulation):
            return batch, fields
        settings = batch_settings(batch, batch, devices, micro, None if micro else accumulation)
        if accumulation not in (None, settings[1]):
            raise InputError(
                f"effective_batch_size={batch} is not per_device_train_batch_size {micro} × "
                f"gradient_accumulation_steps {accumulation} × {devices} devices: leave one out"
            )
        return batch, {**fields, **dict(zip(_BATCH, settings, strict=True))}


def _ladder(request: Request, search: Search) -> list[Rung]:
    picks = search.ladder(int(request.memory * share) for _, share in RUNGS.values())
    chosen = [(rung, choice) for rung, choice in zip(RUNGS.items(), picks, strict=True) if choice is not None]
    fastest = min((search.seconds[choice] for _, choice in chosen), default=0)
    rungs = []
    for (name, (profile, share)), choice in chosen:
        memory_args = memory_arguments(
            request.memory_args,
            choice,
            memory_profile=profile,
            target_memory_utilization=share,
            **dict.fromkeys(THRESHOLDS[1:]),  # the profile's
        )
        rungs.append(
            Rung(
                name,
                share,
                choice,
                choice.configured(request.preset),
                memory_args,
                search.found[choice],
                fastest / search.seconds[choice],
            )
        )
    return rungs


def _too_large(request: Request, search: Search | None, least: Choice | None) -> Rejected:
    """Why a method does not fit at all."""
    method = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}[request.preset.method]
    if least is None:
        return Rejected(method, "no combination of settings works on this device: see hf-memopt doctor")
    estimate, budget = search.found[least], request.memory_budget
    if estimate.device_bytes <= budget:
        reason = (
            f"{gib(estimate.host_bytes)} of host memory for each device, and {gib(request.host_memory)} may be used"
        )
        return Rejected(method, f"{method} needs {reason} ({summarize(least)}); --host-memory sets the limit")
    return Rejected(
        method,
        f"{method} needs at least {gib(estimate.device_bytes)} ({summarize(least)}), and "
        f"{budget / request.memory:.0%} of {request.preset.hardware.label} is {gib(budget)}",
    )


def _left_out(request: Request, search: Search, chosen: list[Choice]):
    """Kinds of settings that are faster than what was chosen, or simpler, and what they would need."""
    budget = request.memory_budget
    families: dict[str, list[Choice]] = {}
    for choice in search.choices:
        for family in _families(choice):
            families.setdefault(family, []).append(choice)
    for family, members in families.items():
        if any(choice in members for choice in chosen):
            continue
        fitting = [choice for choice in members if search.needs(choice) <= budget]
        if fitting:
            fastest = min(search.seconds[choice] for choice in chosen)
            slower = min(search.seconds[choice] for choice in fitting) / fastest
            yield Rejected(
                family, f"predicted to take {slower:.2f} × the time of the fastest profile{_price(slower, fitting)}"
            )
        else:
            least = min(members, key=search.needs)
            about = "" if search.found.get(least) else "about "
            yield Rejected(family, f"needs at least {about}{gib(int(search.needs(least)))}, of {gib(budget)}")


def _price(slower: float, members: list[Choice]) -> str:
    """Why faster settings were left out nevertheless."""
    if slower >= 1:
        return ""
    return ", too small a gain to depend on the host" if members[0].offloads else ", too small a gain for its rounding"


def _families(choice: Choice) -> list[str]:
    if choice.strategy != "none":
        return [choice.strategy]
    named = []
    if not choice.levers:
        named.append("no memory feature")
    if not choice.checkpointed and not choice.compressed and not choice.activations_offloaded:
        named.append("all activations kept")
    if choice.compressed:
        named.append("8-bit activations")
    if choice.activations_offloaded or choice.inputs_offloaded:
        named.append("activations in host memory")
    if choice.optimizer_offloaded:
        named.append("optimizer states in host memory")
    return named
