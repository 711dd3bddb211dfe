"""plan(): the fastest settings that fit, from safe to maximum."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hf_memopt.errors import InputError, choose
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.preset_estimates import preset_job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.model import infer_task
from hf_memopt.field_values import fit, hints_of
from hf_memopt.levers.arguments import RUNGS, THRESHOLDS, MemoryArguments
from hf_memopt.planner.choices import Choice, choices, memory_arguments
from hf_memopt.planner.devices import preset_of
from hf_memopt.planner.nearest import nearest_changes
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.sketch import baselines, sketch_of, traced_jobs
from hf_memopt.presets import METHODS, Preset
from hf_memopt.presets.batch import batch_settings
from hf_memopt.units import GIB, gib

# Of the host for each device, where nobody says: 2 TB for eight (NVIDIA DGX A100 and H100 user guides), and of a
# desktop's 64 GiB what its other programs leave.
_USUAL_HOST = {True: 256 * GIB, False: 48 * GIB}
_LARGE = 36 * GIB
_BATCH = ("per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Rung:
    """One step of the ladder.

    Attributes:
        name: safe, balanced, aggressive or maximum.
        share: of the device's memory that it may fill.
        choice: the settings, short.
        preset: the settings, whole.
        memory_args: the levers, and the monitor's profile.
        estimate: of exactly these settings.
        relative_speed: predicted, 1.0 for the fastest rung.
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
        """The settings in a few words."""
        return summarize(self.choice)


@dataclass(frozen=True)
class Rejected:
    """Settings that cannot be, and why."""

    settings: str
    reason: str


@dataclass(frozen=True)
class Request:
    """What is planned for.

    Attributes:
        preset: the device's, with as many devices as are planned for; strategy "none" leaves the engine open.
        memory: bytes of each device that may be used.
        fields, lora: TrainingArguments and LoraConfig fields that are given.
        memory_args: MemoryArguments that are given.
        more: further arguments of estimator.job.describe: video, frozen, task, attn_implementation, …
        quantization: gives the BitsAndBytesConfig of a preset; None for the preset's own.
        host_memory: bytes that one process may use on the host; None where that is not known.
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
    def room(self) -> int:
        """Bytes that the fullest rung may fill."""
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
        task = self.more.get("task") or infer_task(self.config)
        found = list(
            choices(
                self.preset, self.config, self.effective_batch_size, self.seq_len, self.memory_args, task, self.fields
            )
        )
        if not found:
            return None
        # Engines compute with weights in 16 bits; autocast's copies of 32-bit weights would pass for activations.
        plain = min(found, key=lambda choice: (choice.strategy == "ddp", choice.levers))

        def build(samples: int, recomputed: bool) -> Job:
            choice = replace(plain, micro_batch=samples, accumulation=1, recomputed=0.0)
            job = self.job(choice)
            checkpointing = {"activation_checkpointing": recomputed}
            if recomputed:
                checkpointing["activation_checkpointing_kwargs"] = {"use_reentrant": False}
            dropped = ("activation_checkpointing", "activation_checkpointing_kwargs", "deepspeed", "fsdp_config")
            kept = {name: value for name, value in job.fields.items() if name not in dropped}
            return dataclasses.replace(job, fields={**kept, **checkpointing})

        say(f"tracing {self.preset.method} training with and without recomputation")
        jobs = baselines(build)
        return Search(found, sketch_of(jobs, traced_jobs(jobs)), self.job, say, self.host_memory)


@dataclass(frozen=True)
class Plan:
    """The ladder, and what was left out.

    Attributes:
        request: with the method that was chosen.
        ladder: from safe to maximum; empty where nothing fits.
        rejected: methods and ways to train that do not fit, with reasons.
        missing_bytes: where nothing fits, what the smallest choice lacks, of the device or else of the host.
        nearest: where nothing fits, changes that would make it fit.
    """

    request: Request
    ladder: list[Rung]
    rejected: list[Rejected]
    missing_bytes: int | None = None
    nearest: list[str] = field(default_factory=list)

    def __iter__(self):
        return iter(self.ladder)

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
            "rejected": [dataclasses.asdict(one) for one in self.rejected],
            "missing_bytes": self.missing_bytes,
            "nearest": self.nearest,
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
    """The fastest settings that are predicted to fit, at four shares of the device's memory.

    Args:
        model: a bundled architecture's name, hub id, folder, config.json or PretrainedConfig.
        hardware: a preset's name, or a device's with a number of devices: rtx_4090, rtx_4090x2, h100_80gbx128; or a
            Preset of the method.
        effective_batch_size: samples per optimizer step over all devices; by default the preset's.
        seq_len: tokens per sample; by default the preset's, within the model's positions.
        method: full, lora or qlora; any takes the first of them that fits.
        strategy: how several devices share the work; by default the fastest that fits.
        memory: bytes of each device that may be used; by default all of it.
        training, lora: TrainingArguments and LoraConfig fields that stay as they are given.
        memory_args: MemoryArguments, whose levers stay on.
        quantization: gives the BitsAndBytesConfig of a preset.
        host_memory: bytes that one process may use on the host; by default 48 GiB, and 256 GiB beside a device of more
            than 36 GiB, which is assumed.
        say: told what is being done.
        more: further arguments of the estimator's: video, frozen, task, attn_implementation, dtype, padded, packed.

    Raises:
        InputError: unknown names, or a batch that the devices cannot share.
    """
    if method not in (*METHODS, "any"):
        raise choose("method", method, [*METHODS, "any"])
    if lora and method == "full":
        raise InputError("lora.* applies to method=lora only, and to its 4-bit form qlora")
    config = load_config(model)
    rejected: list[Rejected] = []
    methods = METHODS if method == "any" else (method,)
    dtype = more.pop("dtype", None)
    for name in methods:
        preset = preset_of(hardware, name, strategy)
        if dtype:
            preset = replace(preset, dtype=dtype)
        request = _request(
            model,
            config,
            preset,
            effective_batch_size,
            seq_len,
            memory,
            training or {},
            lora or {},
            memory_args or MemoryArguments(),
            more,
            quantization,
            host_memory,
        )
        search = request.search(say)
        rungs = _ladder(request, search) if search else []
        if rungs:
            return Plan(request, rungs, rejected + list(_left_out(request, search, [rung.choice for rung in rungs])))
        least = search.smallest() if search else None
        rejected.append(_too_large(request, search, least))
    if least is None:
        return Plan(request, [], rejected)
    found, room = search.found[least], request.room
    if found.device_bytes <= room:
        wanted = f"--host-memory {-(-found.host_bytes // GIB)}"
        return Plan(request, [], rejected, found.host_bytes - request.host_memory, [wanted])
    return Plan(request, [], rejected, found.device_bytes - room, nearest_changes(request, least, say))


def _request(
    model, config, preset, effective, seq_len, memory, fields, lora, memory_args, more, quantization, host_memory
) -> Request:
    """The request of one method, checked."""
    from transformers import TrainingArguments

    fields = fit(hints_of(TrainingArguments), fields)
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    length = seq_len or min(preset.seq_len, positions or preset.seq_len)
    devices = preset.processes
    micro, accumulation = (fields.get(name) for name in _BATCH)
    if micro and accumulation and effective is None:
        effective = micro * accumulation * devices
    batch = effective or -(-preset.effective_batch_size // devices) * devices
    if batch < 1 or batch % devices:
        raise InputError(
            f"effective_batch_size={batch} cannot be shared by {devices} devices: use a multiple of {devices}"
        )
    if micro or accumulation:
        found = batch_settings(batch, batch, devices, micro, None if micro else accumulation)
        if accumulation not in (None, found[1]):
            raise InputError(
                f"effective_batch_size={batch} is not per_device_train_batch_size {micro} × "
                f"gradient_accumulation_steps {accumulation} × {devices} devices: leave one out"
            )
        fields = {**fields, **dict(zip(_BATCH, found, strict=True))}
    if memory is None:
        memory = preset.hardware.memory
    if host_memory is None:
        host_memory = _USUAL_HOST[preset.hardware.memory > _LARGE]
    if memory <= 0:
        raise InputError(f"memory={memory} must be above 0 bytes")
    return Request(
        model, config, preset, memory, length, batch, fields, lora, memory_args, more, quantization, host_memory
    )


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
        return Rejected(method, "no combination of settings works here: see hf-memopt doctor")
    found, room = search.found[least], request.room
    if found.device_bytes <= room:
        reason = f"{gib(found.host_bytes)} of host memory for each device, of {gib(request.host_memory)}"
        return Rejected(method, f"{method} needs {reason} ({summarize(least)}); --host-memory says how much there is")
    return Rejected(
        method,
        f"{method} needs {gib(found.device_bytes)} at least ({summarize(least)}), and {room / request.memory:.0%} of "
        f"{request.preset.hardware.label} is {gib(room)}",
    )


def _left_out(request: Request, search: Search, chosen: list[Choice]):
    """Families of settings that are faster than what was chosen, or simpler, and what they would need."""
    room = request.room
    families: dict[str, list[Choice]] = {}
    for choice in search.choices:
        for family in _families(choice):
            families.setdefault(family, []).append(choice)
    for family, members in families.items():
        if any(choice in members for choice in chosen):
            continue
        fitting = [choice for choice in members if search.needs(choice) <= room]
        if fitting:
            slower = min(search.seconds[choice] for choice in fitting) / min(search.seconds[one] for one in chosen)
            yield Rejected(
                family, f"predicted to take {slower:.2f} of the time of the fastest rung{_price(slower, fitting)}"
            )
        else:
            least = min(members, key=search.needs)
            about = "" if search.found.get(least) else "about "
            yield Rejected(family, f"needs {about}{gib(int(search.needs(least)))} at least, of {gib(room)}")


def _price(slower: float, members: list[Choice]) -> str:
    """Why what is faster was left out all the same."""
    if slower >= 1:
        return ""
    return ", too little for counting on the host" if members[0].offloads else ", too little for what it rounds"


def _families(choice: Choice) -> list[str]:
    if choice.strategy != "none":
        return [choice.strategy]
    named = []
    if not choice.levers:
        named.append("no lever at all")
    if not choice.recomputed and not choice.compressed and not choice.activations_offloaded:
        named.append("all activations kept")
    if choice.compressed:
        named.append("8-bit activations")
    if choice.activations_offloaded or choice.inputs_offloaded:
        named.append("activations in host memory")
    if choice.optimizer_offloaded:
        named.append("optimizer states in host memory")
    return named
