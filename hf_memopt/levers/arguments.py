"""MemoryArguments: what TrainingArguments has no word for."""

from dataclasses import dataclass, field, fields
from typing import Any

from hf_memopt.errors import InputError, choose
from hf_memopt.field_values import check_value, hints_of

# Shares of capacity: what to aim at, when to warn, when to act, when to free at once.
PROFILES = {
    "aggressive": (0.92, 0.94, 0.96, 0.98),
    "balanced": (0.90, 0.92, 0.95, 0.97),
    "conservative": (0.85, 0.88, 0.92, 0.95),
}
# A plan's rung -> (profile, share of the memory to fill). The last one ends where that profile warns.
RUNGS = {
    "safe": ("conservative", PROFILES["conservative"][0]),
    "balanced": ("balanced", PROFILES["balanced"][0]),
    "aggressive": ("aggressive", PROFILES["aggressive"][0]),
    "maximum": ("aggressive", PROFILES["aggressive"][1]),
}
CHUNK = 1024  # tokens: the loss_chunk_size that this package itself chooses
CHOICES = {"activation_compression": ("int8",), "checkpoint_keeps": ("attention", "matmuls")}
_POSITIVE = (
    "min_batch_size",
    "max_batch_size",
    "adjustment_frequency",
    "max_memory_gib",
    "loss_chunk_size",
    "sliding_window",
    "max_tokens_per_batch",
    "sparse_block_size",
)
THRESHOLDS = ("target_memory_utilization", "warning_threshold", "critical_threshold", "emergency_threshold")


@dataclass
class MemoryArguments:
    """How memory is watched and kept, parsed by HfArgumentParser beside TrainingArguments.

    What TrainingArguments has a word for stays there: the micro-batch is per_device_train_batch_size, the allocator's
    cache is emptied every torch_empty_cache_steps, layers are recomputed with activation_checkpointing.

    Raises:
        InputError: a value that cannot be.
    """

    oom_recovery: bool = field(
        default=True, metadata={"help": "When memory runs out inside a step, go on in smaller pieces."}
    )
    probe_worst_batch: bool = field(
        default=False, metadata={"help": "Before the first step, try the largest batch that is going to come."}
    )
    probe_save: bool = field(
        default=False,
        metadata={"help": "Save a checkpoint after the first step, so that one that cannot be ends soon."},
    )
    min_batch_size: int = field(default=1, metadata={"help": "Samples that a piece of a micro-batch has, at least."})
    max_batch_size: int | None = field(
        default=None,
        metadata={"help": "Samples that a micro-batch may grow to while memory is free; the effective batch stays."},
    )
    adjustment_frequency: int = field(
        default=100, metadata={"help": "Optimizer steps without trouble before a smaller micro-batch grows again."}
    )
    memory_profile: str = field(
        default="balanced", metadata={"help": "Thresholds: aggressive, balanced or conservative."}
    )
    target_memory_utilization: float | None = field(
        default=None, metadata={"help": "Share of the memory to aim at. Default: the profile's, like the next three."}
    )
    warning_threshold: float | None = field(default=None, metadata={"help": "Share of the memory to warn at."})
    critical_threshold: float | None = field(
        default=None, metadata={"help": "Share of the memory at which the micro-batch is made smaller."}
    )
    emergency_threshold: float | None = field(
        default=None, metadata={"help": "Share of the memory at which caches are freed first."}
    )
    max_memory_gib: float | None = field(
        default=None, metadata={"help": "Hard limit of this process on its device, in GiB."}
    )
    silent_mode: bool = field(default=True, metadata={"help": "Say only what changed, not every step's memory."})
    snapshot_steps: str = field(
        default="", metadata={"help": "Record every allocation of these steps into a file (2, 2-4 or 2,100-101)."}
    )
    snapshot_on_oom: bool = field(
        default=False, metadata={"help": "On CUDA, keep the last allocations, and write them when memory runs out."}
    )
    reduce_eval_logits: bool = field(
        default=False,
        metadata={
            "help": "In evaluation keep the likeliest tokens instead of all logits; compute_metrics may take their "
            "argmax and nothing else."
        },
    )

    loss_chunk_size: int | None = field(
        default=None, metadata={"help": "Tokens whose logits are held at once; the loss stays what it is."}
    )
    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={"help": "Padded tokens of a micro-batch, at most, in place of per_device_train_batch_size samples."},
    )
    logits_to_keep: bool = field(
        default=False, metadata={"help": "Compute logits of answers alone, not of prompts that carry no labels."}
    )
    activation_compression: str | None = field(
        default=None, metadata={"help": "int8: keep activations, or what checkpointing keeps of them, in 8 bits."}
    )
    activation_offload: bool = field(
        default=False, metadata={"help": "Keep activations in host memory between forward and backward."}
    )
    checkpoint_ratio: float | None = field(
        default=None, metadata={"help": "Share of the layers whose activations are recomputed, evenly spread."}
    )
    checkpoint_keeps: str | None = field(
        default=None,
        metadata={
            "help": "What recomputed layers keep all the same: attention (its outputs), or matmuls (those and "
            "every second matrix product's)."
        },
    )
    compile_memory_budget: float | None = field(
        default=None, metadata={"help": "With torch_compile: share of the activations that is kept, 0 to 1."}
    )
    frozen_without_grad: bool = field(
        default=True, metadata={"help": "Run frozen modules outside autograd where nothing they get needs a gradient."}
    )
    adam_mini: bool = field(
        default=False, metadata={"help": "Adam-mini in place of `optim`: one second moment a block of weights."}
    )
    optimizer_cpu_offload: bool = field(
        default=False, metadata={"help": "Keep optimizer states in host memory and step there, on one device."}
    )
    optimizer_in_backward: bool = field(
        default=False,
        metadata={
            "help": "Update weights during backward and free gradients at once. One micro-batch a step, no "
            "clipping: gradient_accumulation_steps=1, max_grad_norm=0."
        },
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Tokens that a token attends to: itself and those right before it."}
    )
    sparse_block_size: int | None = field(
        default=None,
        metadata={
            "help": "Block-sparse attention: tokens of a block. flex attention skips most with multiples of 128."
        },
    )
    num_local_blocks: int = field(
        default=4,
        metadata={"help": "With sparse_block_size: blocks before its own that a token attends to."},
    )
    num_global_blocks: int = field(
        default=1,
        metadata={"help": "With sparse_block_size: blocks at a sequence's beginning that all its tokens attend to."},
    )

    def __post_init__(self) -> None:
        for name, hint in hints_of(type(self)).items():
            check_value(name, hint, getattr(self, name))
        if self.memory_profile not in PROFILES:
            raise choose("memory_profile", self.memory_profile, PROFILES)
        for name, usual in zip(THRESHOLDS, PROFILES[self.memory_profile], strict=True):
            if getattr(self, name) is None:
                setattr(self, name, usual)
        values = [getattr(self, name) for name in THRESHOLDS]
        if not 0 < values[0] <= values[1] <= values[2] <= values[3] <= 1:
            told = ", ".join(f"{name}={value}" for name, value in zip(THRESHOLDS, values, strict=True))
            raise InputError(f"thresholds must rise and lie between 0 and 1: {told}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise InputError(f"{name}={value} must be above 0")
        for name in ("num_local_blocks", "num_global_blocks"):
            if getattr(self, name) < 0:
                raise InputError(f"{name}={getattr(self, name)} must be 0 or more")
        for name, known in CHOICES.items():
            if getattr(self, name) not in (None, *known):
                raise choose(name, getattr(self, name), known)
        for name, none in (("checkpoint_ratio", "no layer"), ("compile_memory_budget", "inputs alone")):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name}={value} must lie between 0 ({none}) and 1 (all)")
        step_ranges(self.snapshot_steps)
        if self.max_batch_size is not None and self.max_batch_size < self.min_batch_size:
            raise InputError(f"max_batch_size={self.max_batch_size} is below min_batch_size={self.min_batch_size}")

    @classmethod
    def names(cls) -> list[str]:
        """The fields' names."""
        return [item.name for item in fields(cls)]

    def levers(self) -> dict[str, Any]:
        """What makes the job smaller and is not as it is by default: name -> value."""
        names = self.names()
        made = names[names.index("reduce_eval_logits") :]
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name in made and getattr(self, item.name) != item.default
        }


def step_ranges(steps: str) -> list[tuple[int, int]]:
    """ "2,100-101" as first and last steps.

    Raises:
        InputError: it says something else.
    """
    found = []
    for part in filter(None, (part.strip() for part in str(steps).split(","))):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdigit() and last.isdigit()) or not 0 < int(first) <= int(last):
            raise InputError(f"snapshot_steps={steps!r}: give steps, counted from 1, such as 2, 2-4 or 2,100-101")
        found.append((int(first), int(last)))
    return found
