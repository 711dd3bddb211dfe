"""Weights as bitsandbytes' 4 bits round them: the model that QLoRA trains on is the rounded one."""

from collections.abc import Collection
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rounding:
    """Quantize a weight and dequantize it.

    Attributes:
        kind: nf4 or fp4.
        double: quantize the blocks' scales, too.
        modules: names of the modules whose weights training quantizes.
    """

    kind: str
    double: bool
    modules: Collection[str]

    def applies_to(self, parameter: str | None) -> bool:
        """True if training would have quantized a parameter."""
        module, _, last = (parameter or "").rpartition(".")
        return last == "weight" and module in self.modules

    def round(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight after a round trip through 4 bits, in its own dtype."""
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

        codes, state = quantize_4bit(weight, compress_statistics=self.double, quant_type=self.kind)
        return dequantize_4bit(codes, state).to(weight.dtype)


@dataclass
class Difference:
    """The absolute difference between rounded weights and exact ones, over all of them."""

    largest: float = 0.0
    total: float = 0.0
    count: int = 0

    def add(self, rounded: torch.Tensor, exact: torch.Tensor) -> None:
        """Add a tensor's."""
        difference = (rounded.float() - exact.float()).abs_()
        self.largest = max(self.largest, float(difference.max()))
        self.total += float(difference.sum(dtype=torch.float64))
        self.count += difference.numel()

    def to_dict(self) -> dict[str, float | None]:
        """Largest and mean difference; None where nothing was compared."""
        if not self.count:
            return {"max_difference": None, "mean_difference": None}
        return {"max_difference": self.largest, "mean_difference": self.total / self.count}


def rounded_modules(model) -> set[str]:
    """Names of the linear layers that transformers quantizes on loading in 4 bits: all but head and tied weights."""
    from transformers.quantizers.base import get_keys_to_not_convert
    from transformers.quantizers.quantizers_utils import should_convert_module

    unconverted = get_keys_to_not_convert(model)
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and should_convert_module(name, unconverted)
    }
