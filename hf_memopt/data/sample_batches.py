"""Samples' lengths, and their batches: packed into rows without padding, or split by sequence parallelism."""

import bisect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError


class PackedBatches(torch.utils.data.BatchSampler):
    """Batches of samples that together have at most `max_tokens` tokens for each of `rows` rows.

    Samples are packed once, by best-fit decreasing; each epoch has the same packs in another order. The number of
    batches is a multiple of the processes, so that each takes equally many steps: packs are divided until it is.

    Args:
        sampler: accelerate sets its `epoch`; the order of samples is not used.
        lengths: tokens of every sample.
        max_tokens: of a pack.
        rows: packs in a batch.
        processes: data-parallel processes, which take batches in turn.
        seed: for the order of packs.

    Raises:
        InputError: a sample is longer than a pack.
    """

    def __init__(
        self, sampler, lengths: Sequence[int], max_tokens: int, rows: int = 1, processes: int = 1, seed: int = 0
    ) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, None, False
        self._seed, self._rows, self._lengths = seed, rows, lengths
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        if lengths[longest] > max_tokens:
            raise InputError(
                f"packing into {max_tokens} tokens: sample {longest} has {lengths[longest]}; raise max_length"
            )
        self._packs = pack_best_fit(lengths, max_tokens)
        while len(self) % processes:
            fullest = max(range(len(self._packs)), key=lambda number: len(self._packs[number]))
            pack = self._packs[fullest]
            if len(pack) < 2:
                break  # fewer samples than processes: accelerate repeats some
            self._packs[fullest : fullest + 1] = [pack[: len(pack) // 2], pack[len(pack) // 2 :]]

    def __len__(self) -> int:
        return -(-len(self._packs) // self._rows)

    def __iter__(self) -> Iterator[list[int]]:
        # As accelerate's SeedableRandomSampler.
        generator = torch.Generator().manual_seed(self._seed + getattr(self.sampler, "epoch", 0))
        order = torch.randperm(len(self._packs), generator=generator).tolist()
        for start in range(0, len(order), self._rows):
            yield [index for number in order[start : start + self._rows] for index in self._packs[number]]

    def largest(self) -> list[int]:
        """The samples of the fullest packs that can be in a batch."""
        fullest = sorted(self._packs, key=lambda pack: -sum(self._lengths[index] for index in pack))
        return [index for pack in fullest[: self._rows] for index in pack]


def packed_batches(loader) -> PackedBatches | None:
    """The PackedBatches of a data loader prepared by accelerate; None where it makes others."""
    batches = getattr(loader, "batch_sampler", None)
    while batches is not None and not isinstance(batches, PackedBatches):
        batches = getattr(batches, "batch_sampler", None)  # accelerate 1.15's BatchSamplerShard and SkipBatchSampler
    return batches


def pack_best_fit(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Samples in packs of at most `max_tokens` by best-fit decreasing: longest first, into the fullest that fits."""
    packs: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, number) of every pack, sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        fitting = bisect.bisect_left(free, (lengths[index], 0))
        if fitting == len(free):
            packs.append([])
            tokens_left, number = max_tokens, len(packs) - 1
        else:
            tokens_left, number = free.pop(fitting)
        packs[number].append(index)
        bisect.insort(free, (tokens_left - lengths[index], number))
    return packs


_PADDING = {"labels": IGNORED}  # everything else is padded with zeros


def with_positions(collate: Callable, processes: int) -> Callable:
    """A collator for sequence parallelism (Ulysses): adds position_ids and pads to a multiple of `processes`.

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


_ALIKE_ROWS = 64  # rows of one size stand for all: images after preprocessing, say


def relative_sizes(data, max_samples: float = math.inf) -> list[float]:
    """Sizes by which samples compare: the result of the dataset's own `sizes()`, their tokens, or, where samples have
    no `input_ids`, all that their columns hold.

    Args:
        max_samples: as in sample_lengths().
    """
    if hasattr(data, "sizes"):
        return data.sizes(max_samples)
    columns = getattr(data, "column_names", None)
    if not columns or "length" in columns or "input_ids" in columns:
        return sample_lengths(data, max_samples)
    rows = min(len(data), max_samples)
    sizes = [_content(data[index]) for index in range(min(rows, _ALIKE_ROWS))]
    return sizes + ([_content(data[index]) for index in range(_ALIKE_ROWS, rows)] if len(set(sizes)) > 1 else [])


def _content(value: Any) -> int:
    """Elements of tensors, characters, and items, summed over a row."""
    if isinstance(value, Mapping):
        return sum(map(_content, value.values()))
    if isinstance(value, list | tuple) and value and not isinstance(value[0], int | float):
        return sum(map(_content, value))
    if hasattr(value, "shape"):
        return math.prod(value.shape)
    return len(value) if hasattr(value, "__len__") else 1


def sample_lengths(data, max_samples: float = math.inf) -> list[int]:
    """Tokens of every sample, by the dataset's own `lengths()` if it has that; 1 where a sample has no tokens.

    Args:
        max_samples: of a dataset without columns, how many samples to load; the others count as 1.
    """
    if hasattr(data, "lengths"):
        return data.lengths()
    columns = getattr(data, "column_names", None) or ()
    if "length" in columns:
        return list(data["length"])
    if "input_ids" in columns and hasattr(data, "with_format"):  # Arrow stores list lengths, so no token is read
        import pyarrow.compute

        batches = data.select_columns(["input_ids"]).with_format("arrow").iter(10_000)
        return [
            size for batch in batches for size in pyarrow.compute.list_value_length(batch["input_ids"]).to_pylist()
        ]

    def length(index: int) -> int:
        row = data[index]
        tokens = row.get("input_ids") if hasattr(row, "get") else row
        return len(tokens) if hasattr(tokens, "__len__") else 1

    return [length(index) if index < max_samples else 1 for index in range(len(data))]
