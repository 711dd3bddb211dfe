"""max_tokens_per_batch (levers/token_budget.py): micro-batches of as many samples as fit a number of tokens."""

from dataclasses import dataclass, field
from typing import ClassVar

from hf_memopt.levers.feature import Feature


@dataclass
class TokenBudget(Feature):
    max_tokens_per_batch: int | None = field(
        default=None,
        metadata={"help": "Largest number of padded tokens in a micro-batch; replaces per_device_train_batch_size."},
    )
    above_zero: ClassVar = ("max_tokens_per_batch",)

    @staticmethod
    def refused(on, facts):
        if on.max_tokens_per_batch is None:
            return
        if on.max_batch_size is not None:
            yield "max_batch_size and max_tokens_per_batch both limit the micro-batch: use one of them"
        if str(facts.fields.get("train_sampling_strategy", "random")) in ("group_by_length", "batch_rebalance"):
            yield "max_tokens_per_batch already groups samples by length: leave train_sampling_strategy out"
