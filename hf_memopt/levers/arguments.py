"""MemoryArguments: memory settings that TrainingArguments does not have."""

from dataclasses import dataclass, field, fields
from typing import Any

from hf_memopt.errors import InputError, choose
from hf_memopt.field_values import check_value, hints_of

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
CHUNK = 1024  # tokens: the loss_chunk_size that this package itself chooses
CHOICES = {
    "loss_reduction": ("sample_mean", "token_mean"),
    "activation_compression": ("int8",),
    "checkpoint_keeps": ("attention", "matmuls"),
}
_POSITIVE = (
    "min_batch_size",
    "max_batch_size",
    "adjustment_frequency",
    "max_memory_gib",
    "loss_chunk_size",
    "mlp_tile_size",
    "sliding_window",
    "max_tokens_per_batch",
    "sparse_block_size",
)
THRESHOLDS = ("target_memory_utilization", "warning_threshold", "critical_threshold", "emergency_threshold")


@dataclass
class MemoryArguments:
    """Memory monitoring, OOM recovery and memory features, parsed by HfArgumentParser beside TrainingArguments.

    What TrainingArguments can express stays there: per_device_train_batch_size is the micro-batch,
    torch_empty_cache_steps empties the allocator's cache, activation_checkpointing checkpoints layers.

    Raises:
        InputError: an invalid value, or values that contradict each other.
    """

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
    reduce_eval_logits: bool = field(
        default=False,
        metadata={
            "help": "During evaluation keep each token's argmax instead of its logits. compute_metrics must need "
            "nothing else."
        },
    )

    loss_chunk_size: int | None = field(
        default=None,
        metadata={"help": "Compute logits and loss for this many tokens at a time. The loss does not change."},
    )
    mlp_tile_size: int | None = field(
        default=None,
        metadata={
            "help": "Run MLPs on this many tokens at a time, and compute their intermediates again in backward."
        },
    )
    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={"help": "Largest number of padded tokens in a micro-batch; replaces per_device_train_batch_size."},
    )
    logits_to_keep: bool = field(
        default=False, metadata={"help": "Compute logits only where there are labels: for answers, not for prompts."}
    )
    activation_compression: str | None = field(
        default=None,
        metadata={"help": "int8: store activations, or the layer inputs that checkpointing stores, in 8 bits."},
    )
    activation_offload: bool = field(
        default=False, metadata={"help": "Offload activations to host memory between forward and backward."}
    )
    weight_streaming: bool = field(
        default=False,
        metadata={
            "help": "Keep frozen weights in host memory, each process its own, and fetch each layer's while it runs."
        },
    )
    weight_streaming_ratio: float = field(
        default=1.0,
        metadata={"help": "With weight_streaming: share of the layers that are streamed, evenly spread."},
    )
    checkpoint_ratio: float | None = field(
        default=None, metadata={"help": "Share of the layers that are checkpointed, evenly spread."}
    )
    checkpoint_keeps: str | None = field(
        default=None,
        metadata={
            "help": "What checkpointed layers store instead of recomputing it: attention (its outputs), or matmuls "
            "(attention's and every second matmul's outputs)."
        },
    )
    compile_memory_budget: float | None = field(
        default=None, metadata={"help": "With torch_compile: share of the activations that is stored, from 0 to 1."}
    )
    frozen_without_grad: bool = field(
        default=True, metadata={"help": "Run frozen modules under no_grad where no input requires a gradient."}
    )
    quantized_experts: bool = field(
        default=False,
        metadata={
            "help": "With 4-bit weights: quantize the experts of MoE layers, too, which stay in 16 bits otherwise."
        },
    )
    adam_mini: bool = field(
        default=False, metadata={"help": "Use Adam-mini instead of `optim`: one second moment per block of weights."}
    )
    optimizer_cpu_offload: bool = field(
        default=False,
        metadata={"help": "Keep optimizer states in host memory and step on the CPU. For a single device."},
    )
    optimizer_in_backward: bool = field(
        default=False,
        metadata={
            "help": "Update each weight during backward and free its gradient at once. Needs "
            "gradient_accumulation_steps=1 and max_grad_norm=0."
        },
    )
    sliding_window: int | None = field(
        default=None, metadata={"help": "Attention window in tokens, the current token included."}
    )
    sparse_block_size: int | None = field(
        default=None,
        metadata={
            "help": "Block-sparse attention with blocks of this many tokens. Multiples of 128 suit flex attention's "
            "kernels best."
        },
    )
    num_local_blocks: int = field(
        default=4,
        metadata={"help": "With sparse_block_size: preceding blocks that a token attends to."},
    )
    num_global_blocks: int = field(
        default=1,
        metadata={"help": "With sparse_block_size: first blocks of a sequence that all its tokens attend to."},
    )

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
        if not 0 < self.weight_streaming_ratio <= 1:
            raise InputError(
                f"weight_streaming_ratio={self.weight_streaming_ratio} must lie above 0 and up to 1 (all layers)"
            )
        for name, nothing in (("checkpoint_ratio", "no layer"), ("compile_memory_budget", "inputs alone")):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{name}={value} must lie between 0 ({nothing}) and 1 (all)")
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
        # The fields before reduce_eval_logits are about monitoring and recovery.
        features = self.names()[self.names().index("reduce_eval_logits") :]
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name in features and getattr(self, item.name) != item.default
        }


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
