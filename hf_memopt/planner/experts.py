"""Whether a plan for QLoRA quantizes experts: where they would not fit otherwise."""

from dataclasses import replace
from typing import Any

import torch

from hf_memopt.estimator.tracing.model import ModelSettings, has_experts, make_model, outside_zero3
from hf_memopt.estimator.tracing.quantization import is_quantized
from hf_memopt.estimator.trl_job import model_task
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.quantized_experts import expert_weights
from hf_memopt.presets import Preset


def with_experts_that_fit(
    memory_args: MemoryArguments, config: Any, task: str, preset: Preset, memory: int
) -> MemoryArguments:
    """MemoryArguments with quantized_experts where the devices together could not hold the experts in 16 bits.

    Args:
        memory: bytes of each device.
    """
    if memory_args.quantized_experts or preset.method != "qlora" or is_quantized(config):
        return memory_args
    return replace(memory_args, quantized_experts=2 * _expert_elements(config, task) > preset.processes * memory)


def _expert_elements(config: Any, task: str) -> int:
    """Elements of the weights that quantized_experts quantizes."""
    if not has_experts(config):
        return 0  # a model without experts need not be built
    with torch.device("meta"), outside_zero3():
        model = make_model(ModelSettings(config=config, task=model_task(task)))
    return sum(weight.numel() for module in model.modules() for _, weight in expert_weights(module))
