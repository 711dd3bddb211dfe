"""Predict whether a Hugging Face training job fits the hardware, and train through out-of-memory errors.

The public names are resolved on first use: importing the package loads neither torch nor transformers.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOME = {
    "get_preset": "hf_memopt.presets",
    "list_presets": "hf_memopt.presets",
    "plan": "hf_memopt.planner.plan",
    "Plan": "hf_memopt.planner.profiles",
    "which_card": "hf_memopt.planner.market.cards",
    "Preset": "hf_memopt.presets",
    "estimate": "hf_memopt.estimator",
    "Estimate": "hf_memopt.estimator",
    "estimate_trainer": "hf_memopt.estimator",
    "list_architectures": "hf_memopt.estimator",
    "detect": "hf_memopt.hardware",
    "get_hardware": "hf_memopt.hardware",
    "list_hardware": "hf_memopt.hardware",
    "InputError": "hf_memopt.errors",
    "MemoryArguments": "hf_memopt.levers.arguments",
    "MemoryCallback": "hf_memopt.monitor.callback",
    "MemoryMonitor": "hf_memopt.monitor.monitor",
    "SnapshotCallback": "hf_memopt.monitor.snapshot_callback",
    "MemoryTrainer": "hf_memopt.trainer.trainer",
    "MemoryTrainerMixin": "hf_memopt.trainer.trainer",
    "TrainingOutOfMemory": "hf_memopt.errors",
    "TrainingInterrupted": "hf_memopt.trainer.interrupt",
    "TrainingTerminated": "hf_memopt.trainer.interrupt",
    "classify_oom": "hf_memopt.oom.classify",
}
# In packages above this one, which it does not import: entry points say where (setup.cfg).
_CONTRIBUTED = ("merge_adapter",)

__all__ = sorted([*_HOME, *_CONTRIBUTED, "__version__"])


def __getattr__(name: str):
    if name in _CONTRIBUTED:
        from hf_memopt.contributed import load_contributed

        return load_contributed("api")[name]
    if name not in _HOME:
        raise AttributeError(f"module 'hf_memopt' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__():
    return __all__
