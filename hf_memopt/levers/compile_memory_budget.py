"""How much the compiler may keep between forward and backward."""

import contextlib


def memory_budget(share: float | None):
    """A context in which torch.compile's partitioner keeps at most a share of the activations, and recomputes the
    cheapest others.

    The setting is the process's (torch has no other) and is read when a graph is compiled, at its first call: it has
    to last as long as training does, and is put back afterwards.

    Args:
        share: 1 keeps what is fastest to keep, 0 the inputs of the compiled region alone; None changes nothing.
    """
    if share is None:
        return contextlib.nullcontext()
    import torch._functorch.config

    return torch._functorch.config.patch(activation_memory_budget=share)
