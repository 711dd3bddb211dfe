"""Dtypes that a trace on the CPU can compute with."""


def traceable_dtype(dtype):
    """bfloat16 for float16, which the CPU's autocast does not support; both take two bytes."""
    import torch

    return torch.bfloat16 if dtype is torch.float16 else dtype
