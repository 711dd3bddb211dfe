"""The share of activations that torch.compile may save."""

import contextlib


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
