"""MemoryArguments: memory settings that TrainingArguments does not have."""

from dataclasses import dataclass, field, fields
from typing import Any

from hf_memopt.errors import InputError, choose
from hf_memopt.field_values import check_value, hints_of
from hf_memopt.levers.feature import Feature
from hf_memopt.levers.features.activations import Activations
from hf_memopt.levers.features.answer_logits import AnswerLogits, EvalLogits
from hf_memopt.levers.features.attention import SlidingWindow, SparseAttention
from hf_memopt.levers.features.checkpointing import Checkpointing
from hf_memopt.levers.features.compile_budget import CompileBudget
from hf_memopt.levers.features.experts import Experts
from hf_memopt.levers.features.frozen import Frozen
from hf_memopt.levers.features.loss_chunks import LossChunks
from hf_memopt.levers.features.mlp_tiles import MlpTiles
from hf_memopt.levers.features.optimizers import AdamMiniStates, OptimizerInBackward, OptimizerOffload
from hf_memopt.levers.features.streaming import Streaming
from hf_memopt.levers.features.token_budget import TokenBudget

# Shares of device memory: target, warning, critical and emergency threshold.
PROFILES = {
    "aggressive": (0.92, 0.94, 0.96, 0.98),
    "balanced": (0.90, 0.92, 0.95, 0.97),
    "conservative": (0.85, 0.88, 0.92, 0.95),
}
# A plan's profile -> (memory_profile, share of device memory to fill). `maximum` fills up to the warning threshold.
PLAN_PROFILES = {
    "safe": ("conservative", PROFILES["conservative"][0]),
    "balanced": ("balanced", PROFILES["balanced"][0]),
    "aggressive": ("aggressive", PROFILES["aggressive"][0]),
    "maximum": ("aggressive", PROFILES["aggressive"][1]),
}
LOSS_REDUCTIONS = ("sample_mean", "token_mean")
THRESHOLDS = ("target_memory_utilization", "warning_threshold", "critical_threshold", "emergency_threshold")


@dataclass
class RecoveryArguments:
    """Monitoring and OOM recovery."""

    oom_recovery: bool = field(
        default=True, metadata={"help": "After an OOM, retry the step in smaller chunks of the micro-batch."}
    )
    loss_reduction: str | None = field(
        default=None,
        metadata={
            "help": "What a loss of your own is, so that micro-batches may be split after an OOM: sample_mean, or "
            "token_mean (over labels that are not -100, of the micro-batch or by num_items_in_batch)."
        },
    )
    probe_worst_batch: bool = field(
        default=False, metadata={"help": "Before the first step, try the largest batch of the data set."}
    )
    probe_save: bool = field(
        default=False,
        metadata={"help": "Save a checkpoint after the first step, so that a failing save ends the run early."},
    )
    min_batch_size: int = field(
        default=1, metadata={"help": "Smallest number of samples in a chunk of a micro-batch."}
    )
    max_batch_size: int | None = field(
        default=None,
        metadata={
            "help": "Samples that a micro-batch may grow to while memory is free. The effective batch does not change."
        },
    )
    adjustment_frequency: int = field(
        default=100,
        metadata={"help": "Optimizer steps without memory pressure before a reduced micro-batch grows again."},
    )
    memory_profile: str = field(
        default="balanced", metadata={"help": "Preset of the four thresholds: aggressive, balanced or conservative."}
    )
    target_memory_utilization: float | None = field(
        default=None,
        metadata={"help": "Share of device memory to use. Default: from memory_profile, as for the thresholds below."},
    )
    warning_threshold: float | None = field(
        default=None, metadata={"help": "Share of device memory at which to warn."}
    )
    critical_threshold: float | None = field(
        default=None, metadata={"help": "Share of device memory at which the micro-batch is reduced."}
    )
    emergency_threshold: float | None = field(
        default=None, metadata={"help": "Share of device memory at which cached blocks are released first."}
    )
    max_memory_gib: float | None = field(
        default=None, metadata={"help": "Hard limit of this process's device memory, in GiB."}
    )
    silent_mode: bool = field(default=True, metadata={"help": "Log changes only, not the memory of every step."})
    snapshot_steps: str = field(
        default="", metadata={"help": "Steps whose allocations are recorded to a file: 2, 2-4 or 2,100-101."}
    )
    snapshot_on_oom: bool = field(
        default=False, metadata={"help": "On CUDA, write a snapshot of the last allocations on an OOM."}
    )


@dataclass
class MemoryArguments(
    # Their fields come in reverse, RecoveryArguments' first. A new memory feature is a name here.
    Frozen,
    SparseAttention,
    SlidingWindow,
    OptimizerInBackward,
    OptimizerOffload,
    AdamMiniStates,
    Experts,
    CompileBudget,
    Checkpointing,
    Streaming,
    Activations,
    AnswerLogits,
    TokenBudget,
    MlpTiles,
    LossChunks,
    EvalLogits,
    RecoveryArguments,
):
    """Memory monitoring, OOM recovery and memory features, parsed by HfArgumentParser beside TrainingArguments.

    What TrainingArguments can express stays there: per_device_train_batch_size is the micro-batch,
    torch_empty_cache_steps empties the allocator's cache, activation_checkpointing checkpoints layers.

    Raises:
        InputError: an invalid value, or values that contradict each other.
    """

    def __post_init__(self) -> None:
        for name, hint in hints_of(type(self)).items():
            check_value(name, hint, getattr(self, name))
        if self.memory_profile not in PROFILES:
            raise choose("memory_profile", self.memory_profile, PROFILES)
        for name, default in zip(THRESHOLDS, PROFILES[self.memory_profile], strict=True):
            if getattr(self, name) is None:
                setattr(self, name, default)
        values = [getattr(self, name) for name in THRESHOLDS]
        if not 0 < values[0] <= values[1] <= values[2] <= values[3] <= 1:
            settings = ", ".join(f"{name}={value}" for name, value in zip(THRESHOLDS, values, strict=True))
            raise InputError(f"thresholds must rise and lie between 0 and 1: {settings}")
        for name in ("min_batch_size", "max_batch_size", "adjustment_frequency", "max_memory_gib"):
            _check_above_zero(self, name)
        if self.loss_reduction not in (None, *LOSS_REDUCTIONS):
            raise choose("loss_reduction", self.loss_reduction, LOSS_REDUCTIONS)
        for feature in FEATURES:
            for name in feature.above_zero:
                _check_above_zero(self, name)
            for name, nothing in feature.shares.items():
                value = getattr(self, name)
                if value is not None and not 0 <= value <= 1:
                    raise InputError(f"{name}={value} must lie between 0 ({nothing}) and 1 (all)")
            for name, choices in feature.choices.items():
                if getattr(self, name) not in (None, *choices):
                    raise choose(name, getattr(self, name), choices)
            feature.check(self)
        step_ranges(self.snapshot_steps)
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise InputError(f"max_batch_size={self.max_batch_size} is below min_batch_size={self.min_batch_size}")

    @property
    def max_memory_bytes(self) -> int | None:
        """max_memory_gib in bytes; None without a limit."""
        return None if self.max_memory_gib is None else int(self.max_memory_gib * 2**30)

    @classmethod
    def names(cls) -> list[str]:
        """The fields' names."""
        return [item.name for item in fields(cls)]

    def levers(self) -> dict[str, Any]:
        """Memory features that are on, and those on by default that are off: name -> value."""
        recovery = {item.name for item in fields(RecoveryArguments)}
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name not in recovery and getattr(self, item.name) != item.default
        }


# In the order of their fields.
FEATURES: tuple[type[Feature], ...] = tuple(
    base for base in reversed(MemoryArguments.__bases__) if issubclass(base, Feature)
)


def _check_above_zero(on: MemoryArguments, name: str) -> None:
    value = getattr(on, name)
    if value is not None and value <= 0:
        raise InputError(f"{name}={value} must be above 0")


def step_ranges(steps: str) -> list[tuple[int, int]]:
    """Parse snapshot_steps: "2,100-101" -> [(2, 2), (100, 101)].

    Raises:
        InputError: not steps, or a range that ends before it starts.
    """
    ranges = []
    for part in filter(None, (part.strip() for part in str(steps).split(","))):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit()) or not 0 < int(first) <= int(last):
            raise InputError(f"snapshot_steps={steps!r}: give steps, counted from 1, such as 2, 2-4 or 2,100-101")
        ranges.append((int(first), int(last)))
    return ranges
