"""compile_memory_budget (levers/compile_memory_budget.py): the share of activations that torch.compile stores."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.feature import Feature


@dataclass
class CompileBudget(Feature):
    compile_memory_budget: float | None = field(
        default=None, metadata={"help": "With torch_compile: share of the activations that is stored, from 0 to 1."}
    )
    shares: ClassVar = {"compile_memory_budget": "inputs alone"}

    @staticmethod
    def refused(on, facts):
        if on.compile_memory_budget is not None and not facts.fields.get("torch_compile"):
            yield (
                "compile_memory_budget applies to compiled models only: set torch_compile=True, or use "
                "checkpoint_ratio"
            )
