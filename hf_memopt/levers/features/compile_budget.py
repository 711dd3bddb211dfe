"""compile_memory_budget: the share of activations that torch.compile stores."""

import contextlib
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


def memory_budget(share: float | None):
    """A context in which torch.compile's partitioner saves at most a share of the activations and recomputes the rest.

    The setting is global (torch 2.13 has no other) and is read when a graph is compiled, at its first call, so the
    context must last as long as training. It is restored afterwards.

    Args:
        share: 1 saves what is fastest to save, 0 the inputs of the compiled region only; None changes nothing.
    """
    if share is None:
        return contextlib.nullcontext()
    import torch._functorch.config

    return torch._functorch.config.patch(activation_memory_budget=share)
