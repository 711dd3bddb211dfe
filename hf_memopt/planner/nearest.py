"""Where nothing fits: what is missing, and the nearest change in each direction."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.architectures import list_architectures, load_config
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.smaller import is_from_scratch, smaller_sizes, with_sizes
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.levers.changes import BF16_WEIGHTS, LORA, QLORA, ZERO3_OFFLOAD, JobFacts, proposals
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.devices import preset_of
from hf_memopt.units import gib

_SHORTEST = 128  # tokens
_MORE_DEVICES = (2, 4, 8, 16, 32, 64, 128)
_ROUNDS = 3  # of one estimate in each direction


def nearest_changes(request, least: Choice, say: Callable[[str], None]) -> list[str]:
    """For every kind of change, the smallest that makes the job fit, as a sentence.

    Args:
        request: a plan.Request for which nothing fits.
        least: the choice that needs the least memory.
        say: called with a line for each thing that takes time.
    """
    say("looking for the smallest changes that would fit")
    directions = [iter(direction) for direction in _directions(request, least)]
    found: dict[int, str] = {}
    for _ in range(_ROUNDS):
        tried = {
            number: job
            for number, direction in enumerate(directions)
            if number not in found and (job := _next_job(direction))
        }
        estimates = estimate_jobs([job for _, job in tried.values()], on_all_cores)
        for (number, (text, _)), estimate in zip(tried.items(), estimates, strict=True):
            if not isinstance(estimate, InputError) and estimate.device_bytes <= request.memory_budget:
                host = f", {gib(estimate.host_bytes)} of host memory" if "offload" in text else ""
                found[number] = f"{text}: {gib(estimate.device_bytes)}{host}"
    return [found[number] for number in sorted(found)]


def _next_job(direction: Iterator[tuple]) -> tuple[str, Job] | None:
    """The next change of a direction that may be, and its job."""
    for text, changed, choice in direction:
        try:
            return text, changed.job(choice)
        except InputError:
            continue
    return None


def _directions(request, least: Choice) -> Iterator[list[tuple]]:
    """Lists of (what would change, the request, the choice), the nearest first."""
    hardware = request.preset.hardware
    job = JobFacts(setup=least.configured(request.preset).setup(), discrete_memory=hardware.memory_apart)
    if settings := BF16_WEIGHTS.settings_for(job):
        text = f"--set {BF16_WEIGHTS.written(settings)} ({BF16_WEIGHTS.effect})"
        preset = replace(request.preset, **settings)
        yield [(text, replace(request, preset=preset), replace(least, **settings))]
    alone = replace(job, setup=replace(job.setup, strategy="none", offload="none"))  # the engine follows the method
    methods = proposals(alone, (LORA, QLORA))
    yield [(change.label, *_with_method(request, least, settings["method"])) for change, settings in methods]
    if request.more.get("video") is None:
        lengths = [request.seq_len // 2**power for power in range(1, 6) if request.seq_len // 2**power >= _SHORTEST]
        yield [(f"--seq-len {length}", replace(request, seq_len=length), least) for length in lengths]
    elif video := request.more["video"].halved():
        yield [(f"max_frames={video.frames}", replace(request, more={**request.more, "video": video}), least)]
    yield [
        (f"{name} instead", replace(request, model=name, config=load_config(name)), least)
        for name in _smaller(request)
    ]
    if request.preset.method == "full" and is_from_scratch(request.config):
        for direction in smaller_sizes(request.config):
            yield [(_as_config(sizes), _of_sizes(request, sizes), least) for sizes in direction]
    yield list(_on_more_devices(request, least))
    if request.preset.processes > 1 and (settings := ZERO3_OFFLOAD.settings_for(job)):
        yield [(ZERO3_OFFLOAD.label, request, _plain(least, settings["strategy"]))]


def _as_config(sizes: dict[str, int]) -> str:
    written = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{written} in the config.json (a smaller model, trained from scratch)"


def _of_sizes(request, sizes: dict[str, int]):
    return replace(request, config=with_sizes(request.config, sizes))


def _with_method(request, least: Choice, method: str):
    single = preset_of(request.preset.hardware.name, method)
    preset = replace(single, processes=request.preset.processes)
    dtype, optim = preset.dtype, preset.training.get("optim", least.optim)
    strategy = "zero2" if method == "qlora" and least.strategy.startswith("zero3") else least.strategy
    choice = replace(_plain(least, strategy), dtype=dtype, optim=optim)
    return replace(request, preset=preset), choice


def _plain(least: Choice, strategy: str) -> Choice:
    """The choice under another engine, with what every engine takes."""
    optim = "adamw_torch" if "offload" in strategy else "adamw_torch_fused" if "8bit" in least.optim else least.optim
    dtype = "bfloat16" if strategy.startswith("zero") or strategy == "fsdp2" else least.dtype
    return replace(
        least,
        strategy=strategy,
        checkpointed=1.0,
        compressed=False,
        activations_offloaded=False,
        inputs_offloaded=False,
        optimizer_offloaded=False,
        optim=optim,
        dtype=dtype,
    )


def _smaller(request) -> list[str]:
    """Bundled models of the same family with fewer weights, the largest first."""
    own = _weights(request.config)
    family = [
        (size, name)
        for name in list_architectures()
        if (config := load_config(name)).model_type == request.config.model_type and (size := _weights(config)) < own
    ]
    return [name for _, name in sorted(family, reverse=True)]


def _weights(config) -> int:
    """About as many weights as a model has, to sort by."""
    text = config.get_text_config()
    width, inner = getattr(text, "hidden_size", 0), getattr(text, "intermediate_size", 0) or 0
    experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None) or 1
    layers = getattr(text, "num_hidden_layers", 0)
    return layers * width * (4 * width + 3 * inner * experts) + text.vocab_size * width


def _on_more_devices(request, least: Choice) -> Iterator[tuple]:
    preset = request.preset
    if not preset.hardware.peer_link:
        return
    strategy = "zero2" if preset.method == "qlora" else "zero3"
    for devices in _MORE_DEVICES:
        if devices <= preset.processes or devices > 8 * preset.processes:
            continue
        batch = -(-request.effective_batch_size // devices) * devices
        changed = replace(request, preset=replace(preset, processes=devices), effective_batch_size=batch)
        choice = replace(_plain(least, strategy), micro_batch=1, accumulation=batch // devices)
        yield f"{devices} × {preset.hardware.label}, strategy {strategy}", changed, choice
