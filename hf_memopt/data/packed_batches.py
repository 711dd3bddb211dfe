"""Batches of whole samples that become one row without padding."""

import bisect
from collections.abc import Iterator, Sequence

import torch

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
        epoch = getattr(self.sampler, "epoch", 0)
        generator = torch.Generator().manual_seed(self._seed + epoch)  # as accelerate's SeedableRandomSampler
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
