"""Predicted peak memory: the genuine Trainer's step on fake tensors, followed storage by storage."""

from hf_memopt.estimator.architectures import list_architectures
from hf_memopt.estimator.of_trainer import estimate_trainer
from hf_memopt.estimator.prediction import estimate
from hf_memopt.estimator.report import Estimate

__all__ = ["Estimate", "estimate", "estimate_trainer", "list_architectures"]
