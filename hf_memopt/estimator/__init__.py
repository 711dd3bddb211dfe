"""Predicted peak memory: the real Trainer's step on fake tensors, followed storage by storage."""

from hf_memopt.estimator.api import estimate, estimate_trainer
from hf_memopt.estimator.architectures import list_architectures
from hf_memopt.estimator.result import Estimate

__all__ = ["Estimate", "estimate", "estimate_trainer", "list_architectures"]
