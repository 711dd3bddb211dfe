"""The smallest combinations of changes with which a job would fit that does not.

A combination changes the method, the length of samples, the number of devices, the weights' dtype, a strategy that the
user fixed or the limit of host memory. Sketches say which of them fit, and estimates confirm what is proposed; of
DeepSpeed, whose estimates take ten times plain ones, only what is near the limit or uses host memory.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter

from hf_memopt.errors import InputError, MethodRefused
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.architectures import list_architectures, load_config
from hf_memopt.estimator.quantized_checkpoints import dequantized
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.smaller import find_experts, is_from_scratch, smaller_sizes, with_sizes
from hf_memopt.estimator.spec_job import attention_layers
from hf_memopt.estimator.tracing.fake_quantization import is_quantized
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.estimator.trl_tasks import TRL_TASKS
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.changes import BF16_WEIGHTS, LORA, QLORA, proposals
from hf_memopt.levers.facts import Facts
from hf_memopt.planner.choice_jobs import choice_job, smallest_choices, trace_sketch
from hf_memopt.planner.choices import Choice, available_strategies, list_choices
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.proposals import Proposal
from hf_memopt.planner.search import Search, resident_bytes
from hf_memopt.planner.sketch import Sketch
from hf_memopt.planner.streamed_weights import excessive_weights
from hf_memopt.planner.trl_choices import fewest_samples
from hf_memopt.presets import METHODS
from hf_memopt.presets.preset import with_strategy
from hf_memopt.units import GIB

_OFFLOAD = "zero3_offload_cpu"  # what a single device may give to its host
_SHORTEST = 128  # tokens
_LENGTHS = (1, 2, 4, 8, 16)  # samples are so many times shorter
_DEVICES = (1, 2, 4, 8)  # times as many
_ROUNDS = 3  # of estimates
_MODELS = 4  # that are tried, the largest first
_APART = 0.75  # of the weights of the model tried before, at most
_DOUBT = 2.0  # of small models, what an estimate says of longer samples is off by nearly as much
_MOST_CHANGES = 3  # in a combination
_PROPOSED = 4  # combinations
# Of a device's memory: a sketch that fits so much less needs no estimate of DeepSpeed. Sketches were low by up to 17 %
# (_CAUTION_MPS in sketch.py), of Qwen3-32B with LoRA under ZeRO-3 on eight cards by 5 %.
_CERTAIN = 1 / 1.2
_WEIGHTS = {"devices": 2}  # of a level, which for others is 1: money beside a setting


@dataclass(frozen=True)
class Combination:
    """Changes of a spec, and the choice that then needs the least.

    Attributes:
        levels: what is changed -> how far; a combination that changes more, or further, is not proposed beside it.
        texts: the changes, as a command line takes them.
        sketched: bytes of each device, by the sketch.
    """

    levels: dict[str, int]
    texts: list[str]
    spec: JobSpec
    choice: Choice
    sketched: int | None = None

    @property
    def certain(self) -> bool:
        """True if it fits by so much that its sketch suffices, where an estimate takes long."""
        if not self.choice.engine.flat_buffers or self.choice.offloads or self.sketched is None:
            return False
        return self.sketched <= _CERTAIN * self.spec.memory_budget

    @property
    def size(self) -> tuple[int, int]:
        """The number of changes, and how far they go: the sort key."""
        return len(self.levels), sum(_WEIGHTS.get(name, 1) * level for name, level in self.levels.items())

    def contains(self, other: "Combination") -> bool:
        """True if it changes everything that the other does, as far or further."""
        return all(self.levels.get(name, 0) >= level for name, level in other.levels.items())


def nearest_changes(
    spec: JobSpec, search: Search, smallest_choice: Choice, say: Callable[[str], None]
) -> list[Proposal]:
    """The smallest combinations of changes that make the job fit, and smaller models.

    Args:
        spec: a JobSpec for which nothing fits.
        search: its Search.
        smallest_choice: the choice that needs the least memory.
        say: called with a line for each thing that takes time.
    """
    say("looking for the smallest changes that would fit")
    combinations = sorted(_fitting(spec, search.sketch, smallest_choice, say), key=attrgetter("size"))
    tried: dict[int, Proposal | None] = {}  # by place; None for what does not fit
    for _ in range(_ROUNDS):
        standing = {place: mix for place, mix in enumerate(combinations) if tried.get(place, mix)}
        smallest = [
            place
            for place, mix in standing.items()
            if not any(mix is not other and mix.contains(other) for other in standing.values())
        ]
        new = [place for place in smallest[:_PROPOSED] if place not in tried]
        for place, estimate in zip(new, _estimates([standing[place] for place in new]), strict=True):
            tried[place] = _proposal(standing[place], estimate)
            if tried[place] is None and isinstance(estimate, Estimate):
                short = [other for other, mix in standing.items() if _falls_short(mix, standing[place], estimate)]
                tried |= dict.fromkeys(short)
    return [tried[place] for place in sorted(tried) if tried[place]][:_PROPOSED] + _smaller_models(
        spec, smallest_choice
    )


def _estimates(combinations: list[Combination]) -> list[Estimate | InputError | None]:
    """The estimate of each; None where its sketch suffices or it is no job."""
    jobs = {}
    for place, combination in enumerate(combinations):
        if not combination.certain:
            with contextlib.suppress(InputError):
                jobs[place] = choice_job(combination.spec, combination.choice)
    estimates = dict(zip(jobs, estimate_jobs([*jobs.values()], on_all_cores, speed=False), strict=True))
    return [estimates.get(place) for place in range(len(combinations))]


def _falls_short(mix: Combination, failed: Combination, estimate: Estimate) -> bool:
    """True if a combination exceeds the device as one did that differs by its samples' length alone, where its sketch
    is as far off, or by its devices, each of which holds no less."""
    differ = {name for name in mix.levels | failed.levels if mix.levels.get(name) != failed.levels.get(name)}
    if mix.choice.strategy != failed.choice.strategy or not mix.sketched or not failed.sketched:
        return False
    if differ == {"length"}:
        needed = mix.sketched * resident_bytes(failed.choice, estimate)
        return needed > _DOUBT * mix.spec.memory_budget * failed.sketched
    return differ == {"devices"} and mix.sketched >= failed.sketched


def _proposal(combination: Combination, estimate: Estimate | InputError | None) -> Proposal | None:
    """The combination with its estimate, or its sketch where that suffices; None where it does not fit."""
    spec, texts = combination.spec, list(combination.texts)
    if combination.certain:
        return Proposal(texts, combination.sketched, spec=spec, choice=combination.choice, sketched=True)
    if estimate is None or isinstance(estimate, InputError):
        return None
    if (needed := resident_bytes(combination.choice, estimate)) > spec.memory_budget:
        return None
    limit = spec.host_memory
    offloads = combination.choice.offloads
    exceeds = offloads and limit is not None and estimate.host_bytes > limit.bytes  # beyond its sketch
    if exceeds and not combination.levels:  # of a smaller model a still smaller one fits
        return None
    if exceeds or "host" in combination.levels:
        texts.append(f"--host-memory {-(-estimate.host_bytes // GIB)}")
    return Proposal(texts, needed, estimate.host_bytes if offloads else None, spec, combination.choice)


def _fitting(spec: JobSpec, sketch: Sketch, smallest: Choice, say: Callable[[str], None]) -> Iterator[Combination]:
    """All combinations of a method, a number of devices and a length whose sketches fit."""
    # Engines compute with 16-bit weights, one device with what its preset loads: each is sketched once.
    sketches = {_weights_key(spec.preset): sketch}
    for method, texts, variant in _methods(spec, smallest):
        alone = "offload" in method or "clipping" in method  # settings of one device
        for times in _DEVICES if spec.preset.hardware.peer_link and not alone else (1,):
            larger = _on_devices(variant, times)
            try:
                choices = _smallest_choices(larger)
            except MethodRefused:
                continue
            if larger.strategy != spec.strategy:  # one that the variant names
                choices = [choice for choice in choices if choice.strategy == larger.strategy]
            key = _weights_key(larger.preset)
            if choices and key not in sketches:
                say(f"tracing {larger.preset.method} training")
                sketches[key] = trace_sketch(larger, choices)
            traced = sketches.get(key, sketch)
            traced = replace(traced, job=replace(traced.job, world_size=larger.preset.processes))
            for share in _LENGTHS if spec.video is None else (1,):
                further = {"devices": times.bit_length() - 1, "length": share.bit_length() - 1}
                levels = method | {name: level for name, level in further.items() if level}
                length = spec.seq_len // share
                if len(levels) > _MOST_CHANGES or (share > 1 and length < _SHORTEST):
                    continue
                shorter = [*texts, f"--seq-len {length}"] if share > 1 else texts
                yield from _combinations(spec, levels, shorter, replace(larger, seq_len=length), choices, traced)


def _combinations(
    spec: JobSpec, levels: dict[str, int], texts: list[str], changed: JobSpec, choices: list[Choice], sketch: Sketch
) -> Iterator[Combination]:
    """The combination with the choice that needs the least; where only that helps, with another strategy than the
    user's, the simplest and then the one that needs the least, or with more host memory."""
    share, fixed, host = spec.seq_len // changed.seq_len, spec.preset.strategy, spec.host_memory
    needs = {choice: _needs(sketch, choice, share) for choice in choices}
    fitting = [choice for choice in choices if needs[choice] <= changed.memory_budget]
    in_host = [c for c in fitting if host is None or not c.offloads or sketch.host_bytes(c) <= host.bytes]
    allowed, allowed_in_host = ([c for c in of if fixed in ("none", c.strategy)] for of in (fitting, in_host))
    if levels and allowed_in_host:
        found = [(levels, min(allowed_in_host, key=lambda c: (c.complexities, needs[c])))]
    elif in_host and fixed != "none":
        simplest = min(in_host, key=lambda c: (c.complexities, needs[c]))
        found = [
            (levels | {"strategy": level}, choice)
            for choice, level in {min(in_host, key=needs.get): 2, simplest: 1}.items()  # one, where they are the same
        ]
    elif allowed:
        found = [(levels | {"host": 1}, min(allowed, key=lambda c: (sketch.host_bytes(c), needs[c])))]
    else:
        found = []
    for level, choice in found:
        yield Combination(level, _texts(texts, spec, changed, choice), changed, choice, needs[choice])


def _methods(spec: JobSpec, smallest: Choice) -> Iterator[tuple[dict[str, int], list[str], JobSpec]]:
    """The spec, with weights in 16 bits, and with smaller methods: levels, texts, spec."""
    yield {}, [], spec
    hardware = spec.preset.hardware
    setup = replace(smallest.configured(spec.preset).setup(), strategy="none", offload="none")
    job = Facts(setup=setup, discrete_memory=hardware.discrete_memory)
    if spec.preset.processes == 1 and (settings := BF16_WEIGHTS.settings_for(job)):
        text = f"--set {BF16_WEIGHTS.written(settings)} ({BF16_WEIGHTS.effect})"
        in_bf16 = replace(spec, preset=replace(spec.preset, **settings))
        yield {"dtype": 1}, [text], in_bf16
        if spec.training.get("max_grad_norm", 1.0) and "gradient_accumulation_steps" not in spec.training:
            texts = [text, "--set max_grad_norm=0 --effective-batch-size 1 (weights are updated in backward)"]
            training = {**spec.training, "max_grad_norm": 0}
            yield {"dtype": 1, "clipping": 1}, texts, replace(in_bf16, training=training, effective_batch_size=1)
    one_device = spec.preset.processes == 1 and spec.preset.strategy == "none" and hardware.discrete_memory
    if one_device and spec.preset.method == "full" and _OFFLOAD in available_strategies():
        preset = with_strategy(spec.preset, _OFFLOAD)
        yield {"offload": 1}, [f"--strategy {_OFFLOAD}"], replace(spec, preset=preset, strategy=_OFFLOAD)
    for change, settings in proposals(job, (LORA, QLORA)):
        try:
            preset = resolve_preset(hardware.name, settings["method"])
        except InputError:  # a device that the catalog lacks
            continue
        preset = replace(preset, hardware=hardware, processes=spec.preset.processes)
        preset = spec.tool.settings(preset, spec) if spec.tool else preset
        level = METHODS.index(settings["method"]) - METHODS.index(spec.preset.method)
        fields = {name: value for name, value in spec.training.items() if name != "optim"}
        yield {"method": level}, [change.label], replace(spec, preset=preset, method=preset.method, training=fields)


def _on_devices(spec: JobSpec, times: int) -> JobSpec:
    """The spec on so many times as many devices."""
    if times == 1:
        return spec
    devices = times * spec.preset.processes
    batch = -(-spec.effective_batch_size // devices) * devices
    return replace(spec, preset=replace(spec.preset, processes=devices), effective_batch_size=batch)


def _smallest_choices(spec: JobSpec) -> list[Choice]:
    """The choices with one sample a micro-batch and the most layers checkpointed, of any strategy."""
    fields = {name: value for name, value in spec.training.items() if name != "gradient_accumulation_steps"}
    fields = {"per_device_train_batch_size": fewest_samples(spec), **fields}
    choices = list_choices(replace(spec, training=fields))
    if (fixed := spec.preset.strategy) != "none":  # others may be what fits
        opened = replace(spec, preset=replace(spec.preset, strategy="none"), training=fields)
        choices += [choice for choice in list_choices(opened) if choice.strategy != fixed]
    return smallest_choices(choices)


def _weights_key(preset) -> tuple[str, bool]:
    """The key of the weights that a trace holds."""
    return preset.method, preset.dtype == "float32" and preset.processes == 1


def _needs(sketch: Sketch, choice: Choice, share: int) -> int:
    """Bytes of each device, with samples so many times shorter.

    ZeRO-3 gathers the embeddings and the head whole beside the layers, beyond stage3_max_live_parameters, which the
    sketch leaves out. Here they count: DeepSpeed's estimates take ten times plain ones, too long for those that fail.
    """
    needed, _ = sketch.device_bytes(choice, 1 / share)
    return needed + (2 * sketch.outside_layers if choice.engine.zero_stage == 3 else 0)  # gathered in 16 bits


def _texts(texts: list[str], before, after, choice: Choice) -> list[str]:
    """The changes of a combination with its devices and its strategy."""
    preset, fixed = after.preset, before.preset.strategy
    if preset.processes > before.preset.processes:
        shared = f", samples shared by {choice.shared}" if choice.shared > 1 else ""
        return [*texts, f"{preset.processes} × {preset.hardware.label}, strategy {choice.strategy}{shared}"]
    return [*texts, f"--strategy {choice.strategy}"] if fixed not in ("none", choice.strategy) else texts


def _smaller_models(spec: JobSpec, smallest: Choice) -> list[Proposal]:
    """The largest smaller model of the family that fits, else another; of a model without weights the nearest smaller
    sizes."""
    if spec.task not in TRL_TASKS and "per_device_train_batch_size" not in spec.training:
        # Where the weights alone are too large, any micro-batch needs the least.
        smallest = replace(smallest, micro_batch=1, accumulation=smallest.micro_batch * smallest.accumulation)
    named = [(f"{name} instead", _of_model(spec, name)) for name in _smaller(spec)]
    directions = [_apart([(text, changed) for text, changed in named if not excessive_weights(changed)])]
    if spec.preset.method == "full" and is_from_scratch(spec.config):
        for steps in smaller_sizes(spec.config):
            specs = (replace(spec, config=with_sizes(spec.config, sizes)) for sizes in steps)
            directions.append(list(zip(map(_as_config, steps), specs, strict=True)))
    if (video := spec.video) and (fewer := video.halved()):
        directions.append([(f"max_frames={fewer.frames}", replace(spec, video=fewer))])
    found: dict[int, Proposal] = {}  # by direction
    for step in range(_MODELS):
        pending = [place for place, steps in enumerate(directions) if place not in found and step < len(steps)]
        steps = (directions[place][step] for place in pending)
        smaller = [Combination({}, [text], changed, smallest) for text, changed in steps]
        fitting = map(_proposal, smaller, _estimates(smaller))
        found |= {place: replace(one, choice=None) for place, one in zip(pending, fitting, strict=True) if one}
    return [found[place] for place in sorted(found)]


def _apart(models: list[tuple[str, JobSpec]]) -> list[tuple[str, JobSpec]]:
    """Without those that have nearly as many weights as the one before, so that a few tries come to one that fits; a
    larger one begins another family."""
    kept, last = [], 0
    for text, spec in models:
        size = _weights(spec.config)
        if size > last or size <= _APART * last:
            kept.append((text, spec))
            last = size
    return kept


def _of_model(spec: JobSpec, name: str) -> JobSpec:
    config = load_config(name)
    own = {key: value for key, value in spec.lora.items() if value != attention_layers(spec.config)}
    quantization = spec.quantization if spec.preset.method == "qlora" else dequantized(config)
    return replace(spec, model=name, config=config, lora=own, quantization=quantization)


def _as_config(sizes: dict[str, int]) -> str:
    written = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{written} in the config.json (a smaller model, trained from scratch)"


def _smaller(spec: JobSpec) -> list[str]:
    """Bundled models with fewer weights, the largest first: those of the same family, then others of the same task."""
    own, task = _weights(spec.config), infer_task(spec.config)
    configs = {name: load_config(name) for name in list_architectures()}
    # A decoder that makes embeddings is none that answers; its file says so.
    use = getattr(spec.config, "purpose", None)
    configs = {name: config for name, config in configs.items() if getattr(config, "purpose", None) == use}
    sizes = {name: size for name, config in configs.items() if (size := _weights(config)) < own}
    family = {name for name in sizes if configs[name].model_type == spec.config.model_type}
    others = {name for name in sizes if infer_task(configs[name]) == task and not is_quantized(configs[name])}
    return sorted(family | others, key=lambda name: (name in family, sizes[name], name))[::-1]


def _weights(config) -> int:
    """About as many weights as a model has, to sort by."""
    text = config.get_text_config()
    experts = getattr(text, find_experts(config) or "", 1)
    inner = (experts > 1 and getattr(text, "moe_intermediate_size", 0)) or getattr(text, "intermediate_size", 0) or 0
    width = getattr(text, "hidden_size", 0)
    layers = getattr(text, "num_hidden_layers", 0)
    words = getattr(text, "vocab_size", 0) or 0  # none of images
    return layers * width * (4 * width + 3 * inner * experts) + words * width
