"""Every name of another library that a trace replaces or relies on although the library does not promise to keep it.

A release that renames one of them must end in a sentence, not in a wrong number: `replacement.check` compares the rows
with what is installed before the first trace that needs them, and `hf-memopt doctor` compares all of them.
"""

from enum import Enum

from hf_memopt.estimator.patches import engine_names, job_names, model_names
from hf_memopt.estimator.patches.names import Names


class Part(Enum):
    """A part of a traced job that needs a row."""

    EVERY_JOB = "every job"
    ACCELERATOR = "an accelerator's job"
    SEVERAL_DEVICES = "several devices"
    LAUNCH = "a script's launcher"
    DDP = "ddp"
    FSDP2 = "fsdp2"
    CONTEXT_PARALLEL = "context parallelism"
    MESH = "sharding by transformers"
    DEEPSPEED = "deepspeed"
    BITSANDBYTES = "4-bit weights and 8-bit optimizers"
    PEFT = "adapters of peft"
    FP8 = "FP8 weights"
    OPTIMIZERS = "optimizers by formula"
    FLASH_ATTENTION = "flash attention"
    LIGER = "Liger's kernels"
    VISION = "vision towers"
    DETECTION = "detection and segmentation"
    ROLLOUTS = "TRL's trainers that generate"
    LEVERS = "memory features"
    OFFLOADED_INPUTS = "checkpointed layers whose inputs are in host memory"
    TRL = "TRL's trainers"
    DRY_RUN = "dry-run"
    WITHOUT_DEEPSPEED = "no deepspeed"


TABLE: dict[Part, tuple[Names, ...]] = {
    Part.EVERY_JOB: job_names.EVERY_JOB,
    Part.ACCELERATOR: job_names.ACCELERATOR,
    Part.SEVERAL_DEVICES: engine_names.SEVERAL_DEVICES,
    Part.LAUNCH: engine_names.LAUNCH,
    Part.DDP: engine_names.DDP,
    Part.FSDP2: engine_names.FSDP2,
    Part.CONTEXT_PARALLEL: engine_names.CONTEXT_PARALLEL,
    Part.MESH: engine_names.MESH,
    Part.DEEPSPEED: engine_names.DEEPSPEED,
    Part.BITSANDBYTES: model_names.BITSANDBYTES,
    Part.OPTIMIZERS: job_names.OPTIMIZERS,
    Part.FP8: model_names.FP8,
    Part.PEFT: model_names.PEFT,
    Part.FLASH_ATTENTION: model_names.FLASH_ATTENTION,
    Part.LIGER: model_names.LIGER,
    Part.VISION: model_names.VISION,
    Part.DETECTION: model_names.DETECTION,
    Part.ROLLOUTS: job_names.ROLLOUTS,
    Part.LEVERS: model_names.LEVERS,
    Part.OFFLOADED_INPUTS: model_names.OFFLOADED_INPUTS,
    Part.TRL: job_names.TRL,
    Part.DRY_RUN: job_names.DRY_RUN,
    Part.WITHOUT_DEEPSPEED: engine_names.WITHOUT_DEEPSPEED,
}
