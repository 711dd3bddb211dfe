"""A change that saves memory, as a row of changes.py or a memory feature declares it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

CHUNK = 1024  # tokens: what this package itself computes at once
_MOST_CHUNKS = 32  # of a micro-batch


def micro_batch_tokens(job) -> int:
    """Tokens of a job's micro-batch (facts.Facts)."""
    return job.fields.get("per_device_train_batch_size", 1) * (job.seq_len or 0)


def chunk_tokens(tokens: int) -> int:
    """Tokens computed at once: more of a very large micro-batch, since many small chunks take time and save little."""
    return max(CHUNK, tokens // _MOST_CHUNKS)


@dataclass(frozen=True, kw_only=True)
class Change:
    """A row of the table.

    Attributes:
        settings: what it sets: fields of TrainingArguments and MemoryArguments, strategy, method, dtype, seq_len and
            max_frames. Empty for advice that is no setting of a job.
        applies: whether it changes anything for a job, a facts.Facts.
        compute: the settings, where they follow from the job's own; None where it changes nothing.
        label: how it is written; by default name=value.
        effect: what it does, in a few words.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    applies: Callable[[Any], bool] = lambda job: True
    compute: Callable[[Any], Mapping[str, Any] | None] | None = None
    label: str = ""
    effect: str = ""

    def settings_for(self, job) -> Mapping[str, Any] | None:
        """The settings for a job; None where the change changes nothing, or where the job could not run with it."""
        settings = self.compute(job) if self.compute else self.settings if self.applies(job) else None
        if settings is None:
            return None
        # What is refused already is another matter, and no reason against this change.
        refused = set(job.changed(settings).refusals()).difference(job.refusals())
        return None if refused else settings

    def written(self, settings: Mapping[str, Any]) -> str:
        """The settings as a command line takes them."""
        values = {name: str(value).lower() if isinstance(value, bool) else value for name, value in settings.items()}
        return self.label or ", ".join(f"{name}={value}" for name, value in values.items())
