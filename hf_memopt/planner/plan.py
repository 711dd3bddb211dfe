"""plan(): the fastest settings that fit, for four profiles from safe to maximum."""

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, MethodRefused, brief, choose, one_line
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.colocation import engine_weights
from hf_memopt.estimator.job import Job, longest_sample
from hf_memopt.estimator.overheads import measured_memory
from hf_memopt.estimator.preset_estimates import preset_job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.throughput import speed_note, unknown_rates
from hf_memopt.estimator.tracing.model import resolve_dtype
from hf_memopt.estimator.tracing.tasks import find_task, infer_task
from hf_memopt.estimator.trl_job import TRL_TASKS
from hf_memopt.field_values import check_value, fit, hints_of
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.host_memory import HostMemory, assumed_host_memory, own_host_memory
from hf_memopt.hardware.measured import measured_on
from hf_memopt.levers.arguments import PLAN_PROFILES, THRESHOLDS, MemoryArguments
from hf_memopt.packages import how_to_install, is_installed
from hf_memopt.planner.alternatives import Alternative, Rejected, left_out, method_alternative, plain_alternative
from hf_memopt.planner.choices import Choice, SearchSpace, memory_arguments
from hf_memopt.planner.devices import preset_of
from hf_memopt.planner.lower_bound import weights_alone
from hf_memopt.planner.nearest import nearest_changes
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.sketch import Sketch, baselines, sketch_of, traced_jobs
from hf_memopt.planner.streaming import lacks_memory, streaming_request, what_lacks, with_host_memory
from hf_memopt.planner.trl_choices import TrlSpace, trl_space
from hf_memopt.presets import METHODS, Preset
from hf_memopt.presets.batch import batch_settings
from hf_memopt.units import GIB, gib

# Whose batches are counted in tokens, as the recipes' are.
_PLANNED_TASKS = (
    *TRL_TASKS,
    *("causal-lm", "image-text-to-text", "seq2seq-lm", "masked-lm", "sequence-classification"),
    *("token-classification", "question-answering", "multiple-choice"),
)
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Profile:
    """One profile of a plan, and its settings.

    Attributes:
        name: safe, balanced, aggressive or maximum.
        share: of the device's memory that it may fill.
        choice: the settings that the search varies.
        preset: all settings, as a Preset.
        memory_args: the memory features, and the monitor's thresholds.
        estimate: of exactly these settings.
        seconds: of an optimizer step, by the sketch that choices are ranked by.
        relative_speed: predicted, 1.0 for the fastest profile.
    """

    name: str
    share: float
    choice: Choice
    preset: Preset
    memory_args: MemoryArguments
    estimate: Estimate
    seconds: float
    relative_speed: float

    @property
    def tokens_per_second(self) -> float | None:
        """The estimate's, of all devices together; None where the device's speed is unknown."""
        return self.estimate.tokens_per_second

    @property
    def summary(self) -> str:
        """The settings in one line."""
        return summarize(self.choice)


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
        host_memory: what one process may use on the host; None where unknown.
        streaming: frozen weights may be in host memory (planner.streaming).
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
    host_memory: HostMemory | None = None
    streaming: bool = False

    @property
    def model_name(self) -> str:
        """As the user wrote it; of a configuration object where it was read, or its type."""
        return str(self.model) if self.is_named else self.config.name_or_path or self.config.model_type

    @property
    def is_named(self) -> bool:
        """Whether the model is a name or a path, which a recipe's command line takes, too."""
        return isinstance(self.model, str | Path)

    @property
    def memory_budget(self) -> int:
        """Bytes of each device that the maximum profile may fill."""
        return int(self.memory * max(share for _, share in PLAN_PROFILES.values()))

    @property
    def trl(self) -> TrlSpace | None:
        """What TRL's trainer of the task leaves open; None for other tasks."""
        return trl_space(self.more.get("task"), self.preset.method, self.preset.processes, self.fields)

    @property
    def fewest_samples(self) -> int:
        """Of a micro-batch."""
        return 1 if self.trl is None else self.trl.fewest_samples

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

    def search(self, say: Callable[[str], None], smallest: bool = False) -> Search | None:
        """The search over all choices; None where compatibility leaves none.

        Args:
            smallest: only of those with the fewest samples and the most layers checkpointed, in fewer traces.
        """
        choices = self.choices()
        if not choices:
            return None
        if smallest:
            fewest, most = min(one.micro_batch for one in choices), max(one.checkpointed for one in choices)
            choices = [one for one in choices if (one.micro_batch, one.checkpointed) == (fewest, most)]
        how = "with" if smallest else "with and without"
        say(f"tracing {self.preset.method} training {how} activation checkpointing")
        jobs = self.baselines(choices)
        sketch = sketch_of(jobs, traced_jobs(jobs))
        if self.trl is not None and self.trl.colocates:
            choices = self._with_shares(choices, sketch)
        return Search(choices, sketch, self.job, say, self.host_memory)

    def _with_shares(self, choices: list[Choice], sketch: Sketch) -> list[Choice]:
        """The choices with all shares of the card that vLLM may take.

        Raises:
            InputError: no share holds the weights.
        """
        weights = engine_weights(sketch.job, sketch.kept[0].peaks)
        shared = [one for choice in choices for one in self.trl.with_shares(choice, sketch.job, weights)]
        if not shared:
            raise InputError(
                f"use_vllm=true: vLLM's copy of the weights takes {gib(weights)}, too much beside training on "
                f"{self.preset.hardware.label}: use vllm_mode=server, or vllm_tensor_parallel_size"
            )
        return shared

    def choices(self) -> list[Choice]:
        """Every combination of settings that compatibility accepts."""
        space = SearchSpace(
            preset=self.preset,
            config=self.config,
            effective_batch_size=self.effective_batch_size,
            seq_len=self.seq_len,
            memory_args=self.memory_args,
            task=self.more.get("task") or infer_task(self.config),
            fixed=self.fields,
            streaming=self.streaming,
        )
        return list(space.choices())

    def baselines(self, choices: list[Choice]) -> list[Job]:
        """The jobs whose traces a sketch of all choices follows from."""
        # Engines compute with 16-bit weights; with others, autocast's copies of 32-bit weights count as activations.
        plain = min(choices, key=lambda choice: (choice.strategy == "ddp", choice.levers))

        def build(samples: int, checkpointed: bool) -> Job:
            choice = replace(plain, micro_batch=samples, accumulation=1, checkpointed=float(checkpointed))
            choice = replace(choice, streamed=float(self.streaming))
            if plain.trl.steps_per_generation:  # a group for every sample, whose batch the trainer takes as whole
                group = self.trl.setting("num_generations")
                choice = replace(choice, trl=replace(plain.trl, steps_per_generation=group))
            job = self.job(choice)
            checkpointing = {"activation_checkpointing": checkpointed}
            if checkpointed:
                checkpointing["activation_checkpointing_kwargs"] = {"use_reentrant": False}
            dropped = ("activation_checkpointing", "activation_checkpointing_kwargs", "deepspeed", "fsdp_config")
            kept = {name: value for name, value in job.fields.items() if name not in dropped}
            return dataclasses.replace(job, fields={**kept, **checkpointing})

        return baselines(build, {choice.checkpointed for choice in choices}, self.fewest_samples)


@dataclass(frozen=True)
class Plan:
    """The profiles that fit, and what was left out.

    Attributes:
        request: with the method that was chosen.
        profiles: the profiles, from safe to maximum; empty where nothing fits.
        rejected: methods and kinds of settings that do not fit, with reasons.
        missing_bytes: where nothing fits, what the smallest settings lack, of the device or else of the host.
        nearest: where nothing fits, changes that would make it fit.
        plain: what the balanced profile (or the safest) would be with every layer checkpointed, without host memory
            and rounding; None where it is so.
        methods: with method "any", the settings of each method that fits, the planned one among them.
        link: that the link to host memory bounds the speed of the usual profile; None where it does not.
    """

    request: Request
    profiles: list[Profile]
    rejected: list[Rejected]
    missing_bytes: int | None = None
    nearest: list[str] = field(default_factory=list)
    plain: Alternative | None = None
    methods: list[Alternative] = field(default_factory=list)
    link: str | None = None

    def __iter__(self):
        return iter(self.profiles)

    def __str__(self) -> str:
        request = self.request
        preset = request.preset
        head = f"{request.model_name} on {preset.processes} × {preset.hardware.label}"
        if not self.profiles:
            return f"{head}: nothing fits\n" + "\n".join(f"would fit: {change}" for change in self.nearest)
        profiles = (
            f"{profile.name}: {profile.summary}: {profile.estimate}".splitlines()[0] for profile in self.profiles
        )
        return f"{head}, {preset.method}, {request.effective_batch_size} samples a step\n" + "\n".join(profiles)

    @property
    def notes(self) -> list[str]:
        """What was not tried; what of the device's memory and speed was measured on it; of GRPO and RLOO, what a step
        generates."""
        preset = self.request.preset
        device = preset.hardware
        memory = measured_memory(device, expandable=True) if measured_on(device) else ()
        notes = [*memory, *filter(None, [self.link, self._speed_note()])]
        if preset.processes > 1 and preset.strategy == "none" and not is_installed("deepspeed"):
            notes.append(f"ZeRO was not tried: deepspeed is not installed: {how_to_install('deepspeed')}")
        if self.request.trl is not None and self.profiles:
            notes += self.request.trl.notes(usual_profile(self.profiles).choice, device)
        return notes

    def _speed_note(self) -> str | None:
        """What the speeds rest on, or why there are none; None of a plan without profiles."""
        if not self.profiles:
            return None
        device, estimate = self.request.preset.hardware, usual_profile(self.profiles).estimate
        if estimate.step_seconds is not None or unknown_rates(device):
            return speed_note(device)
        return next((note for note in estimate.notes if note.startswith("speed:")), None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as one JSON object."""
        from hf_memopt.planner.launch import as_dict

        host = self.request.host_memory
        return {
            "model": self.request.model_name,
            "method": self.request.preset.method,
            "hardware": self.request.preset.hardware.name,
            "devices": self.request.preset.processes,
            "usable_bytes": self.request.memory,
            "usable_host_bytes": host and host.bytes,
            "host_memory_source": host and host.source,
            "effective_batch_size": self.request.effective_batch_size,
            "seq_len": self.request.seq_len,
            "profiles": [as_dict(self.request, profile) for profile in self.profiles],
            "rejected": [dataclasses.asdict(rejected) for rejected in self.rejected],
            "plain": self.plain and self.plain.to_dict(),
            "methods": [method.to_dict() for method in self.methods],
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
    quantization: Callable | None = None,
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
        seq_len: tokens per sample; by default the preset's, of several methods' the longest, within the model's
            positions.
        method: full, lora or qlora; any takes the first of them that fits without host memory, else the first whose
            safest profile does, else the first that fits, and sketches the others that fit.
        strategy: how several devices train together; by default the fastest that fits.
        memory: bytes of each device that may be used; by default all of it.
        training, lora: TrainingArguments and LoraConfig fields that the plan keeps.
        memory_args: MemoryArguments that the plan keeps.
        quantization: makes the BitsAndBytesConfig of a preset.
        host_memory: bytes of host memory that one process may use; by default what is free on this machine
            (hardware="auto"), or what a small box with the device has.
        say: called with a line for each thing that takes time.
        more: further arguments of estimator.job.describe: video, frozen, task, attn_implementation, dtype,
            padded, packed. With task dpo, kto, reward, grpo, rloo or sft the job is that of TRL's trainer, and
            `training` has the fields of its configuration.

    Raises:
        InputError: unknown names, or a batch that the devices cannot share.
    """
    _check_types(locals())
    question = ask(
        model,
        method,
        training=training,
        lora=lora,
        memory_args=memory_args,
        more=more,
        hardware=hardware,
        strategy=strategy,
        effective_batch_size=effective_batch_size,
        seq_len=seq_len,
        memory=memory,
        quantization=quantization,
        host_memory=host_memory,
    )
    if method == "any":  # a Preset is of one method
        return _answer(question, (hardware.method,) if isinstance(hardware, Preset) else METHODS, say)
    return _answer(question, (method,), say)


def ask(model, method: str, *, training=None, lora=None, memory_args=None, more=None, **settings) -> "Question":
    """plan()'s arguments as a question.

    Args:
        settings: the fields of Question that are not derived here.

    Raises:
        InputError: an unknown model or method.
    """
    if method not in (*METHODS, "any"):
        raise choose("method", method, [*METHODS, "any"])
    if lora and method == "full":
        raise InputError("lora.* applies to method=lora only, and to its 4-bit form qlora")
    for name in ("deepspeed", "fsdp", "fsdp_config"):
        if value := (training or {}).get(name):
            raise InputError(
                f"{name}={brief(value)}: plan chooses the engine's settings: name the engine with strategy, or ask "
                "`hf-memopt estimate` about this one"
            )
    config, more = load_config(model), dict(more or {})
    dtype = more.pop("dtype", None)
    return Question(
        model=model,
        config=config,
        dtype=resolve_dtype(config, dtype) if dtype else None,
        fields=training or {},
        lora=lora or {},
        memory_args=memory_args or MemoryArguments(),
        more=more,
        **settings,
    )


def _check_types(arguments: dict[str, Any]) -> None:
    """Compare plan()'s arguments with its annotations."""
    for name, hint in typing.get_type_hints(plan).items():
        if name in arguments:
            check_value(name, hint, arguments[name])


def _answer(question: "Question", methods: tuple[str, ...], say: Callable[[str], None]) -> Plan:
    """The plan of the first method that fits without host memory, else of the first whose safest profile does, else of
    the first that fits, or what is missing."""
    question = question.of_one_length(methods)
    rejected: list[Rejected] = []
    searches: dict[str, tuple[Request, Search | None]] = {}
    profiles_by_method: dict[str, list[Profile]] = {}
    refused: list[MethodRefused] = []
    for method in methods:
        try:
            request = question.for_method(method)
            reason = _far_too_large(request)
            search = None if reason else request.search(_numbered(say, method, methods))
        except MethodRefused as error:
            refused.append(error)
            rejected.append(Rejected(_METHODS[method], one_line(error)))
            continue
        searches[method] = request, search
        if reason:
            rejected.append(reason)
        elif profiles := _profiles(request, search) if search else []:
            profiles_by_method[method] = profiles
            if not usual_profile(profiles).choice.offloads:
                break
        else:
            rejected.append(_too_large(request, search, search.smallest() if search else None))
    if not searches:
        raise refused[0]
    if not profiles_by_method:
        nearest: list[str] = []
        if streamed := _streamed(searches, rejected, nearest, say):
            return streamed
        method = [*searches][-1]
        return _nothing_fits(*searches[method], rejected, nearest, _numbered(say, method, methods))
    # Of methods whose usual profiles lean on the host, one that has a safe profile without it.
    method = min(
        profiles_by_method,
        key=lambda one: (
            bool(usual_profile(profiles_by_method[one]).choice.offloads),
            bool(profiles_by_method[one][0].choice.offloads),
        ),
    )
    (request, search), profiles = searches[method], profiles_by_method[method]
    profile = usual_profile(profiles)
    rejected += [*_safe_left_out(profiles), *left_out(request, search, [profile.choice for profile in profiles])]
    if request.trl is not None:
        rejected += [Rejected(field, reason) for field, reason in request.trl.left_out()]
    plain = plain_alternative(request, search, profile)
    beside = _methods(question, methods, searches, profile, say) if len(methods) > 1 else []
    link = search.cost.link_bound(profile.choice)
    return Plan(request, profiles, rejected, plain=plain, methods=beside, link=link)


def _streamed(searches: dict, rejected: list[Rejected], nearest: list[str], say) -> Plan | None:
    """The plan of the first method that fits with frozen weights in host memory; None where none does.

    Args:
        searches: method -> its Request and Search.
        rejected, nearest: get why a method does not fit so either, and the host memory with which it would.
    """
    resident = [replace(one, settings=f"{one.settings}, all weights on the device") for one in rejected]
    requests = filter(None, (streaming_request(request) for request, _ in searches.values()))
    asked = [(request, lacks_memory(request)) for request in requests]
    resident += [Rejected(_streamed_method(request), reason) for request, reason in asked if reason]
    for request, reason in sorted(asked, key=lambda one: bool(one[1])):  # what lacks memory only to say how much
        if reason and nearest:
            rejected.append(Rejected(_streamed_method(request), reason))
            continue
        try:
            search = request.search(say)
        except InputError:  # weights that cannot be streamed
            continue
        if search is None:
            continue
        if not (profiles := _profiles(request, search)):
            lacking = Rejected(_streamed_method(request), what_lacks(request, search))
            rejected.append(lacking)
            resident.append(lacking)
            nearest += filter(None, [with_host_memory(request, search)])
            continue
        others = left_out(request, search, [profile.choice for profile in profiles])
        link = search.cost.link_bound(usual_profile(profiles).choice)
        return Plan(request, profiles, [*resident, *_safe_left_out(profiles), *others], link=link)
    return None


def _streamed_method(request: Request) -> str:
    return f"{_METHODS[request.preset.method]}, weights streamed"


def _numbered(say: Callable[[str], None], method: str, methods: tuple[str, ...]) -> Callable[[str], None]:
    """say() that says which of several methods it is about."""
    if len(methods) == 1:
        return say
    return lambda text: say(f"method {methods.index(method) + 1} of {len(methods)}: {text}")


def _nothing_fits(request: Request, search: Search | None, rejected: list[Rejected], nearest: list[str], say) -> Plan:
    """What is missing.

    Args:
        search: None where there are no choices, or where the weights alone ruled them out.
        nearest: changes that are known to make the job fit.
    """
    certain = search is None and _far_too_large(request)  # which no estimate would change
    search = request.search(say, smallest=True) if certain else search
    least = search and (search.one_sample("none") if certain else search.smallest())
    if least is None:
        return Plan(request, [], rejected)
    estimate, budget = search.found.get(least), request.memory_budget
    if estimate and estimate.device_bytes <= budget:
        wanted = f"--host-memory {-(-estimate.host_bytes // GIB)}"
        return Plan(request, [], rejected, estimate.host_bytes - request.host_memory.bytes, [wanted])
    nearest = [*nearest, *nearest_changes(request, search, least, say)]
    return Plan(request, [], rejected, int(search.needs(least)) - budget, nearest)


def usual_profile(profiles: list[Profile]) -> Profile:
    """The balanced profile, or the safest that fits."""
    return next((profile for profile in profiles if profile.name == "balanced"), profiles[0])


def _safe_left_out(profiles: list[Profile]) -> list[Rejected]:
    """Why there is no safe profile, or why it depends on the host."""
    if profiles[0].name != "safe":
        share, apart = PLAN_PROFILES["safe"][1], profiles[0].preset.hardware.discrete_memory
        without = " without host memory, which a safe profile does not need" if apart else ""
        return [Rejected("safe", f"nothing fits {share:.0%}{without}")]
    if profiles[0].choice.offloads:
        return [Rejected("safe without host memory", "nothing fits: every profile depends on host memory")]
    return []


def _methods(question: "Question", methods, searches, profile: Profile, say) -> list[Alternative]:
    """Every method that fits the memory of a profile, with its settings; by sketches but for the profile's own."""
    beside = []
    for method in methods:
        if method not in searches:
            try:
                request = question.for_method(method)
                searches[method] = request, request.search(_numbered(say, method, methods))
            except InputError:  # the plan stands without it, as without 4 bits where there are no kernels for them
                continue
        if alternative := method_alternative(*searches[method], profile):
            beside.append(alternative)
    return beside


@dataclass(frozen=True, kw_only=True)
class Question:
    """plan()'s arguments, before a method is chosen; None stands for the preset's or the device's."""

    model: Any
    config: Any
    hardware: str | Preset
    dtype: str | None
    fields: dict[str, Any]
    lora: dict[str, Any]
    memory_args: MemoryArguments
    more: dict[str, Any]
    effective_batch_size: int | None = None
    seq_len: int | None = None
    strategy: str | None = None
    memory: int | None = None
    quantization: Callable[[Preset], Any] | None = None
    host_memory: int | None = None

    def of_one_length(self, methods: tuple[str, ...]) -> "Question":
        """With the longest samples of the methods' presets where the user set no length, so that all are asked about
        the same step."""
        if len(methods) == 1 or self.seq_len is not None:
            return self
        lengths = [preset_of(self.hardware, method, self.strategy).seq_len for method in methods]
        return replace(self, seq_len=longest_sample(self.config, max(lengths)))

    def for_method(self, method: str) -> Request:
        """The request of one method, checked."""
        from transformers import TrainingArguments

        task = self.more.get("task") or infer_task(self.config)
        if task not in _PLANNED_TASKS:
            find_task(task, self.config)
            raise InputError(f"task={task}: plan knows models of text and video; `hf-memopt estimate` takes this one")
        preset = preset_of(self.hardware, method, self.strategy)
        if self.dtype:
            preset = replace(preset, dtype=self.dtype)
        trl = TRL_TASKS.get(task)
        fields = fit(hints_of(trl.config_class if trl else TrainingArguments), self.fields)
        space = trl_space(task, method, preset.processes, fields)
        if space is not None and (reason := space.refused(preset.strategy)):
            raise InputError(f"strategy={preset.strategy} with task={task}: {reason}")
        batch, fields = self._batch(preset, fields, space)
        for name in ("memory", "host_memory", "seq_len"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InputError(f"{name}={value} must be above 0{'' if name == 'seq_len' else ' bytes'}")
        self._check_memory(preset.hardware)
        if self.host_memory is not None:
            host_memory = HostMemory(self.host_memory, "--host-memory", assumed=False)
        elif self.hardware == "auto" and preset.hardware.discrete_memory:
            host_memory = own_host_memory(preset.processes)
        else:
            host_memory = assumed_host_memory(preset.hardware)
        return Request(
            model=self.model,
            config=self.config,
            preset=preset,
            memory=min(filter(None, (self.memory or preset.hardware.memory, self.memory_args.max_memory_bytes))),
            seq_len=self.seq_len or longest_sample(self.config, preset.seq_len),
            effective_batch_size=batch,
            fields=fields,
            lora=self.lora,
            memory_args=self.memory_args,
            more=self.more,
            quantization=self.quantization,
            host_memory=host_memory,
        )

    def _check_memory(self, device: Hardware) -> None:
        """Refuse more than a named card has. A CPU stands for any machine, a Preset for what is free on this one."""
        if device.backend == "cpu" or not isinstance(self.hardware, str) or (self.memory or 0) <= device.memory:
            return
        raise InputError(
            f"memory={gib(self.memory)}: {device.label} has {gib(device.memory)} for a job; leave it out to plan for "
            "all of it, or describe a device that has more (see docs/plans.md)"
        )

    def _batch(self, preset: Preset, fields: dict[str, Any], trl: TrlSpace | None) -> tuple[int, dict[str, Any]]:
        """The effective batch, and the fields with both halves of it where the user set one."""
        devices, effective = preset.processes, self.effective_batch_size
        micro, accumulation = (fields.get(name) for name in _BATCH)
        if micro and accumulation and effective is None:
            effective = micro * accumulation * devices
        if trl is not None:
            effective = trl.whole_batch(effective, preset.effective_batch_size)
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


def _profiles(request: Request, search: Search) -> list[Profile]:
    picks = search.fastest_for(int(request.memory * share) for _, share in PLAN_PROFILES.values())
    chosen = [
        (profile, choice) for profile, choice in zip(PLAN_PROFILES.items(), picks, strict=True) if choice is not None
    ]
    fastest = min((search.seconds[choice] for _, choice in chosen), default=0)
    profiles = []
    for (name, (thresholds, share)), choice in chosen:
        memory_args = memory_arguments(
            request.memory_args,
            choice,
            memory_profile=thresholds,
            target_memory_utilization=share,
            **dict.fromkeys(THRESHOLDS[1:]),  # the profile's
        )
        profiles.append(
            Profile(
                name,
                share,
                choice,
                choice.configured(request.preset),
                memory_args,
                search.found[choice],
                search.seconds[choice],
                fastest / search.seconds[choice],
            )
        )
    return profiles


_METHODS = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}


def _far_too_large(request: Request) -> Rejected | None:
    """Why a method need not be searched: without a trace, what it holds for certain exceeds the device."""
    alone = weights_alone(request)
    if alone is None or alone[0] <= request.memory_budget:
        return None
    method = _METHODS[request.preset.method]
    return Rejected(method, f"{method} needs at least {gib(alone[0])} for {alone[1]} alone, and {_budget(request)}")


def _budget(request: Request) -> str:
    budget = request.memory_budget
    return f"{budget / request.memory:.0%} of {request.preset.hardware.label} is {gib(budget)}"


def _too_large(request: Request, search: Search | None, least: Choice | None) -> Rejected:
    """Why a method does not fit at all."""
    method = _METHODS[request.preset.method]
    if least is None:
        return Rejected(method, "no combination of settings works on this device: see hf-memopt doctor")
    estimate, budget = search.found[least], request.memory_budget
    if estimate.device_bytes <= budget:
        reason = (
            f"{gib(estimate.host_bytes)} of host memory for each device, and {gib(request.host_memory.bytes)} may be "
            f"used ({request.host_memory.source})"
        )
        return Rejected(method, f"{method} needs {reason} ({summarize(least)}); --host-memory sets the limit")
    return Rejected(
        method,
        f"{method} needs at least {gib(estimate.device_bytes)} ({summarize(least)}), and {_budget(request)}",
    )
