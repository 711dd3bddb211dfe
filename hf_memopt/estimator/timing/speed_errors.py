"""How far predicted speeds were off published ones, by kind of job and family of cards.

From runs to which no constant was fitted and whose software the trace has (benchmarks/results/speed_published.json;
tests/estimator/test_speed.py compares). Where there is no such row, a prediction was compared with nothing.
"""

from dataclasses import dataclass

from hf_memopt.estimator.job import Job
from hf_memopt.estimator.smaller import find_experts
from hf_memopt.hardware.catalog import DEVICES_PER_HOST, Hardware, box_of

SHORT = 2048  # tokens of a micro-batch, below which launching takes longer than computing with adapters
DENSE, MOE, ADAPTERS = "dense models", "mixtures of experts", "adapters in short batches"
PCIE, NODES = "models sharded over PCIe", "several nodes"
SHARED = "samples that devices share"  # no run of these was compared, either
GENERATED = "steps that generate"  # of GRPO; of RLOO no run was compared
OFFLOADED = "weights, optimizer states or activations in host memory"  # no run of these was compared
_OFFLOADS = ("weight_streaming", "optimizer_cpu_offload", "activation_offload")


@dataclass(frozen=True)
class SpeedError:
    """The error that nine of ten runs of a kind stayed within, in steps of 5 %; of families with fewer than four runs
    that of the kind's runs on all cards."""

    kind: str
    architecture: str
    error: float
    runs: int


ERRORS = (
    SpeedError(ADAPTERS, "8.0", 0.2, 2),
    SpeedError(ADAPTERS, "8.9", 0.25, 19),
    SpeedError(DENSE, "12.0", 0.2, 6),
    SpeedError(DENSE, "8.0", 0.15, 42),
    SpeedError(DENSE, "8.9", 0.2, 3),
    SpeedError(DENSE, "9.0", 0.2, 2),
    SpeedError(MOE, "8.0", 0.1, 10),
    SpeedError(PCIE, "8.6", 0.75, 2),
    SpeedError(PCIE, "8.9", 0.75, 5),
    SpeedError(NODES, "8.0", 0.1, 4),
    SpeedError(NODES, "9.0", 0.1, 1),
)

# Of all cards together: too few runs are published of each (benchmarks/results/speed_generated.json).
GENERATING = SpeedError(GENERATED, "", 0.55, 33)


def job_kind(job: Job) -> str:
    """The kind of a job, by what bounds its speed."""
    if job.generates:
        return GENERATED
    if job.engine.offloads or any(getattr(job.memory_args, name, False) for name in _OFFLOADS):
        return OFFLOADED
    if job.shared > 1:
        return SHARED
    if job.world_size > DEVICES_PER_HOST:
        return NODES
    box = box_of(job.device)
    if job.engine.shards_weights and not (box.switched or box.meshed):
        return PCIE
    if find_experts(job.config):
        return MOE
    if job.peft_config is not None and (job.micro_batch_tokens or SHORT) < SHORT:
        return ADAPTERS
    return DENSE


def find_error(kind: str, device: Hardware) -> SpeedError | None:
    """The error of a kind of jobs on a family of cards; None where no such run was compared."""
    if kind == GENERATED:
        return GENERATING
    return next((row for row in ERRORS if row.kind == kind and row.architecture == device.architecture), None)


def describe_error(kind: str, device: Hardware) -> str:
    """What predicted speeds rest on, in a sentence."""
    if kind == GENERATED:
        return (
            f"±{GENERATING.error:.0%} is what nine of ten of {GENERATING.runs} published runs of GRPO stayed within, "
            "on all cards (benchmarks/results/speed_generated.json); of RLOO none was compared"
        )
    if row := find_error(kind, device):
        return (
            f"±{row.error:.0%} is what nine of ten published runs of {kind} stayed within, {row.runs} of them on "
            f"cards of architecture {row.architecture} (benchmarks/results/speed_published.json)"
        )
    return f"predicted for {kind} on {device.label}, which was not compared with any run"
