"""Batches whose tokens several processes share (Ulysses): every token says where in its sample it stands."""

from collections.abc import Callable

import torch

from hf_memopt.data.tokens import IGNORED

_PADDING = {"labels": IGNORED}  # everything else is padded with zeros


def with_positions(collate: Callable, processes: int) -> Callable:
    """A collator whose batches have position_ids and a length that the processes can share.

    Args:
        collate: makes batches of tensors (samples, tokens), padded on the right.
        processes: that share a batch's tokens.
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
