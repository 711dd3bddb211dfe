"""quantized_experts (levers/quantized_experts.py): the experts of MoE layers in 4 bits."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.feature import Feature


@dataclass
class Experts(Feature):
    quantized_experts: bool = field(
        default=False,
        metadata={
            "help": "With 4-bit weights: quantize the experts of MoE layers, too, which stay in 16 bits otherwise."
        },
    )
    order: ClassVar = -1  # before others wrap the modules that it replaces

    @staticmethod
    def refused(on, facts):
        if not on.quantized_experts:
            return
        if facts.fields.get("torch_compile"):
            yield "quantized_experts chooses which tensors to save, as torch_compile does: use one of them"
        if facts.engine.shards_weights:
            yield f"quantized_experts needs whole weights, and {facts.setup.strategy} shards them: leave it out"

    @staticmethod
    def put_on(on, model, label_smoothing):
        if on.quantized_experts:
            from hf_memopt.levers.quantized_experts import quantize_experts

            quantize_experts(model)
