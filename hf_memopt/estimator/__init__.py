"""Predicted peak memory: the real Trainer's step on fake tensors, followed storage by storage.

The names are resolved on first use: tables of this package are read without an import of torch.
"""

from importlib import import_module

_HOME = {
    "Estimate": "hf_memopt.estimator.result",
    "estimate": "hf_memopt.estimator.api",
    "estimate_trainer": "hf_memopt.estimator.api",
    "list_architectures": "hf_memopt.estimator.architectures",
}

__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module 'hf_memopt.estimator' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
