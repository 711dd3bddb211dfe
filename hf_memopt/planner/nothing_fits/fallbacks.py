"""Jobs to plan where nothing fits: the same method with settings that no search of its own asks for.

They are not asked for before: what fits without them trains as fast, more exactly or with less host memory.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from hf_memopt.estimator.quantized_checkpoints import holds_fp8
from hf_memopt.estimator.smaller import find_experts
from hf_memopt.estimator.spec_job import attention_layers, names_layers
from hf_memopt.estimator.tracing.model import count_weights
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.estimator.trl_tasks import model_task
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.changes import BF16_WEIGHTS
from hf_memopt.levers.facts import Facts
from hf_memopt.planner.choices import ZERO_OFFLOAD, available_strategies
from hf_memopt.planner.settle import settle
from hf_memopt.presets import Preset
from hf_memopt.presets.preset import with_strategy

_ZERO_BYTES = 16  # of a weight: in 16 bits, with its gradient, fp32 master weight and states


@dataclass(frozen=True, kw_only=True)
class Fallback:
    """A job to plan instead.

    Attributes:
        spec: settled.
        trying: what is said before it is tried.
        named, without: what this job has and what the settings that do not fit have, in words that follow a method's.
        change: what it changes of the numbers, as a sentence; None where it changes nothing.
    """

    spec: JobSpec
    trying: str
    named: str
    without: str
    change: str | None = None


def fallbacks(request: JobSpec, settled: Mapping[str, JobSpec]) -> Iterator[Fallback]:
    """The jobs to plan instead, the most exact first.

    Args:
        settled: method -> the JobSpec for which nothing fits.
    """
    if [*settled] == ["full"]:
        yield from _offloaded(settled["full"])
        yield from _in_bf16(request, settled["full"])
    if "qlora" in settled:
        yield from _quantized_experts(settled["qlora"])


def _offloaded(spec: JobSpec) -> Iterator[Fallback]:
    """DeepSpeed's ZeRO with one process, which keeps master weights, gradients and states in host memory, where that
    suffices for them: known without a trace."""
    preset, host = spec.preset, spec.host_memory
    started = isinstance(spec.hardware, Preset)  # a recipe that plans for itself: DeepSpeed needs a launcher
    if preset.processes > 1 or spec.strategy or spec.tool or started or not preset.hardware.discrete_memory:
        return
    weights = count_weights(spec.config, model_task(spec.task or infer_task(spec.config)))
    if ZERO_OFFLOAD in available_strategies() and (host is None or _ZERO_BYTES * weights <= host.bytes):
        yield Fallback(
            spec=replace(spec, preset=with_strategy(preset, ZERO_OFFLOAD)),
            trying="nothing fits on the device alone: trying DeepSpeed with one process, which uses host memory",
            named=" with DeepSpeed's offload",
            without=" without DeepSpeed's offload",
        )


def _in_bf16(request: JobSpec, spec: JobSpec) -> Iterator[Fallback]:
    """Weights in bf16 instead of the preset's fp32, where the user left their dtype open. Another tool's file has
    words of its own for it."""
    if request.dtype is not None or request.tool:
        return
    preset = spec.preset
    if BF16_WEIGHTS.settings_for(Facts(setup=preset.setup(), discrete_memory=preset.hardware.discrete_memory)):
        yield Fallback(
            spec=settle(replace(request, dtype="bfloat16"), "full"),
            trying="nothing fits with float32 weights: trying bfloat16",
            named=" with bfloat16 weights",
            without=" with float32 weights",
            change=f"weights are loaded in bfloat16, as float32 ones do not fit: {BF16_WEIGHTS.effect}",
        )


def _quantized_experts(spec: JobSpec) -> Iterator[Fallback]:
    """Experts in 4 bits, too, which bitsandbytes leaves in 16: adapters must leave them out."""
    quantized = spec.memory_args.quantized_experts
    if spec.tool or quantized or not find_experts(spec.config) or holds_fp8(spec.config, None, spec.preset.hardware):
        return
    own = names_layers(spec.lora)
    if not own and isinstance(spec.hardware, Preset):  # of a recipe, whose adapters are not the plan's to change
        return
    attention = attention_layers(spec.config)
    adapted = "" if own else f", and adapters are those of {', '.join(attention)}"
    yield Fallback(
        spec=replace(
            spec,
            memory_args=replace(spec.memory_args, quantized_experts=True),
            lora=spec.lora if own else {**spec.lora, "target_modules": attention},
        ),
        trying="nothing fits with experts in 16 bits: trying 4 bits",
        named=" with experts in 4 bits",
        without=" with experts in 16 bits",
        change=f"experts are quantized to 4 bits (quantized_experts), as they do not fit in 16{adapted}",
    )
