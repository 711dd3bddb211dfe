"""The jobs of a spec's choices: the one that is estimated, those that a sketch is traced from, the search over all."""

from collections.abc import Callable
from dataclasses import replace

from hf_memopt.errors import InputError
from hf_memopt.estimator.colocation import engine_weights
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choices import Choice, list_choices, memory_arguments
from hf_memopt.planner.search import Search
from hf_memopt.planner.sketch import Sketch, baselines, make_sketch, traced_jobs
from hf_memopt.planner.trl_choices import fewest_samples, trl_space
from hf_memopt.units import gib


def choice_job(spec: JobSpec, choice: Choice) -> Job:
    """The job of a choice, for the estimator."""
    preset = choice.configured(spec.preset)
    chosen = replace(
        spec,
        preset=preset,
        hardware=None,
        training=choice.fields(preset, spec.training),
        lora=spec.lora if preset.method != "full" else {},
        memory_args=memory_arguments(spec.memory_args, choice),
    )
    return spec_job(_as_read(chosen, spec, choice) if spec.tool and spec.tool.reads else chosen)


def _as_read(chosen: JobSpec, spec: JobSpec, choice: Choice) -> JobSpec:
    """A choice's job as its tool reads the file, whose keys may say more: an engine's file, a size of chunks."""
    read, own = spec.tool.reads(choice.settings), spec.tool.reads({}).training
    changed = {name: value for name, value in spec.training.items() if own.get(name) != value}  # by a search
    # A file's checkpointing is the Trainer's, not FSDP's.
    fields = replace(choice, checkpointed=0.0).fields(chosen.preset) | read.training | changed
    beside_own_engine = "ddp" if chosen.preset.processes > 1 else "none"
    preset = replace(
        chosen.preset,
        name="",
        training=spec.preset.training,
        dtype=read.dtype or "auto",
        strategy=beside_own_engine if fields.get("deepspeed") else chosen.preset.strategy,
    )
    named = {name: getattr(read.memory_args, name) for name in read.named}
    return replace(chosen, preset=preset, training=fields, memory_args=replace(chosen.memory_args, **named))


def baseline_jobs(spec: JobSpec, choices: list[Choice]) -> list[Job]:
    """The jobs whose traces a sketch of all choices follows from."""
    # Engines compute with 16-bit weights; with others, autocast's copies of 32-bit weights count as activations.
    plain = min(choices, key=lambda choice: (choice.strategy == "ddp", choice.levers))

    def build(samples: int, checkpointed: bool) -> Job:
        choice = replace(
            plain,
            micro_batch=samples,
            accumulation=1,
            shared=1,
            checkpointed=float(checkpointed),
            streamed=float(spec.streaming),
        )
        if plain.trl.steps_per_generation:  # a group for every sample, whose batch the trainer takes as whole
            group = trl_space(spec).setting("num_generations")
            choice = replace(choice, trl=replace(plain.trl, steps_per_generation=group))
        job = choice_job(spec, choice)
        checkpointing = {"activation_checkpointing": checkpointed}
        if checkpointed:
            checkpointing["activation_checkpointing_kwargs"] = {"use_reentrant": False}
        dropped = ("activation_checkpointing", "activation_checkpointing_kwargs", "deepspeed", "fsdp_config")
        fields = {name: value for name, value in job.fields.items() if name not in dropped}
        return replace(job, fields={**fields, **checkpointing})

    return baselines(build, {choice.checkpointed for choice in choices}, fewest_samples(spec))


def trace_sketch(spec: JobSpec, choices: list[Choice]) -> Sketch:
    """The sketch of all choices, from a few traces."""
    jobs = baseline_jobs(spec, choices)
    return make_sketch(jobs, traced_jobs(jobs))


def smallest_choices(choices: list[Choice]) -> list[Choice]:
    """The choices with the fewest samples and the most layers checkpointed: the others need more."""
    fewest = min((choice.micro_batch for choice in choices), default=0)
    checkpointed = max((choice.checkpointed for choice in choices), default=0)
    return [choice for choice in choices if (choice.micro_batch, choice.checkpointed) == (fewest, checkpointed)]


def start_search(spec: JobSpec, say: Callable[[str], None], smallest: bool = False) -> Search | None:
    """The search over all choices; None where compatibility leaves none.

    Args:
        smallest: only of those with the fewest samples and the most layers checkpointed, in fewer traces.

    Raises:
        InputError: nothing is left for a quick plan, or beside vLLM.
    """
    choices = list_choices(spec)
    if not choices:
        return None
    if spec.quick:
        names = ", ".join(sorted({choice.strategy for choice in choices}))
        choices = [choice for choice in choices if choice.engine.plain]  # whose devices hold whole models
        if not choices:
            raise InputError(f"strategy={names}: only an estimate tells what sharded models need: leave quick out")
    choices = smallest_choices(choices) if smallest else choices
    how = "with" if smallest else "with and without"
    say(f"tracing {spec.preset.method} training {how} activation checkpointing")
    sketch = trace_sketch(spec, choices)
    if (space := trl_space(spec)) is not None and space.colocates:
        weights = engine_weights(sketch.job, sketch.plain[0].peaks)
        choices = [shared for choice in choices for shared in space.with_shares(choice, sketch.job, weights)]
        if not choices:  # no share of the card that vLLM may take holds its weights
            raise InputError(
                f"use_vllm=true: vLLM's copy of the weights takes {gib(weights)}, too much beside training on "
                f"{spec.preset.hardware.label}: use vllm_mode=server, or vllm_tensor_parallel_size"
            )
    return Search(
        choices, sketch, lambda choice: choice_job(spec, choice), say, host_memory=spec.host_memory, quick=spec.quick
    )
