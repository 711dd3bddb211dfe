"""Batches for sequence parallelism (Ulysses): explicit positions, and a length divisible by the processes."""

from collections.abc import Callable

import torch

from hf_memopt.data.tokens import IGNORED

_PADDING = {"labels": IGNORED}  # everything else is padded with zeros


def with_positions(collate: Callable, processes: int) -> Callable:
    """A collator that adds position_ids and pads to a multiple of `processes`.

    Args:
        collate: returns tensors (samples, tokens), padded on the right.
        processes: that split each sample's tokens.
    """

    def collate_with_positions(rows):
        batch = collate(rows)
        samples, length = batch["input_ids"].shape
        if "position_ids" not in batch:
            batch["position_ids"] = torch.arange(length).expand(samples, length).contiguous()
        missing = -length % processes
        return {
            name: torch.nn.functional.pad(tensor, (0, missing), value=_PADDING.get(name, 0))
            if tensor.shape == (samples, length)
            else tensor
            for name, tensor in batch.items()
        }

    return collate_with_positions
