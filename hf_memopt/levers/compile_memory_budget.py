"""How much the compiler may keep between forward and backward."""


def set_memory_budget(share: float) -> None:
    """Have torch.compile's partitioner keep at most a share of the activations, and recompute the cheapest others.

    The setting is the process's: torch has no other.

    Args:
        share: 1 keeps what is fastest to keep, 0 the inputs of the compiled region alone.
    """
    import torch._functorch.config

    torch._functorch.config.activation_memory_budget = share
