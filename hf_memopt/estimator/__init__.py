"""Predicted peak memory: the genuine Trainer's step on fake tensors, followed storage by storage."""

from hf_memopt.estimator.api import estimate
from hf_memopt.estimator.architectures import list_architectures
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.trainer_job import estimate_trainer

__all__ = ["Estimate", "estimate", "estimate_trainer", "list_architectures"]
