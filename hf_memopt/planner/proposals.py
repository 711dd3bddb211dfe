"""Changes with which a job fits that does not: what plans and estimates propose, from one search."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hf_memopt.estimator.job import Job
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.planner.choices import Choice
from hf_memopt.presets.launch_script import as_word
from hf_memopt.units import gib

# Fields that are off where a job has no value for them.
_SWITCHES = ("activation_checkpointing", "torch_compile")
# TrainingArguments fields that a plan sets and that change no training step's memory.
_BESIDE = ("per_device_eval_batch_size", "dataloader_prefetch_factor", "output_dir")


@dataclass(frozen=True)
class Proposal:
    """Changes with which a job is predicted to fit.

    Attributes:
        changes: of what its user asked for, as a command line takes them.
        device_bytes: what it then needs of each device.
        host_bytes: of host memory for each process; None where it uses none worth a word.
        spec, choice: the job and the settings that then fit; without a choice it is another model's.
        sketched: the bytes are a sketch's.
    """

    changes: Sequence[str]
    device_bytes: int = 0
    host_bytes: int | None = None
    spec: JobSpec | None = None
    choice: Choice | None = None
    sketched: bool = False

    @property
    def text(self) -> str:
        """The changes and what the job then needs."""
        host = f", {gib(self.host_bytes)} of host memory" if self.host_bytes else ""
        about = "about " if self.sketched else ""
        return f"{' and '.join(self.changes)}: {about}{gib(self.device_bytes)}{host}"


def differences(before: Job, after: Job) -> list[str]:
    """The --set words that make one job of another, of the same model, method and strategy."""
    names = sorted({*before.fields, *after.fields}.difference(_BESIDE))
    changed = {name: after.fields.get(name) for name in names if after.fields.get(name) != before.fields.get(name)}
    if (after.memory_args or MemoryArguments()).adam_mini:  # which stands in its place
        changed.pop("optim", None)
    if after.dtype != before.dtype:
        changed["dtype"] = after.dtype
    had, has = (job.memory_args or MemoryArguments() for job in (before, after))
    changed |= {
        name: getattr(has, name) for name in MemoryArguments.names() if getattr(has, name) != getattr(had, name)
    }
    return set_words(changed)


def set_words(settings: dict[str, Any]) -> list[str]:
    """Settings as --set takes them; a switch that is left out is off."""
    off = {name: False for name in _SWITCHES if name in settings and settings[name] is None}
    return [f"--set {name}={as_word(value)}" for name, value in (settings | off).items() if value is not None]
