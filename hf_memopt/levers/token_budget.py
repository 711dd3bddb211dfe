"""Batches limited by padded tokens instead of by samples."""

from collections.abc import Iterator, Sequence

import torch

from hf_memopt.errors import InputError

_MULTIPLE = 8  # tokens; collators pad to it, and samples are shuffled within equal padded lengths


class TokenBudgetBatches(torch.utils.data.BatchSampler):
    """Batches of samples of similar length, with at most `max_tokens` padded tokens each.

    Sorted lengths are divided at the same places in every epoch, so the number of batches is constant; samples of
    equal padded length and the order of the batches are shuffled. The number of batches is a multiple of the
    processes, so that each takes equally many steps: the largest batches are halved until it is.

    Args:
        sampler: yields the samples in an epoch's order; accelerate sets its `epoch`.
        lengths: tokens of every sample.
        max_tokens: samples × longest sample of a batch, at most.
        processes: data-parallel processes, which take batches in turn.
        seed: for the order of batches; the order within a batch is the sampler's.

    Raises:
        InputError: a sample is longer than the budget.
    """

    def __init__(self, sampler, lengths: Sequence[int], max_tokens: int, processes: int = 1, seed: int = 0) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, None, False
        self._seed = seed
        self._lengths = [-(-length // _MULTIPLE) * _MULTIPLE for length in lengths]
        longest = max(range(len(lengths)), key=self._lengths.__getitem__)
        if self._lengths[longest] > max_tokens:
            raise InputError(
                f"max_tokens_per_batch={max_tokens}: sample {longest} has {lengths[longest]} tokens"
                + (f", {self._lengths[longest]} with padding" if lengths[longest] <= max_tokens else "")
                + "; raise it, or cut samples (max_length)"
            )
        self._cuts = _cuts(sorted(self._lengths), max_tokens, processes)

    def __len__(self) -> int:
        return len(self._cuts)

    def __iter__(self) -> Iterator[list[int]]:
        epoch = getattr(self.sampler, "epoch", 0)
        order = sorted(self.sampler, key=self._lengths.__getitem__)  # stable: within a length, in the sampler's order
        generator = torch.Generator().manual_seed(self._seed + epoch)  # as accelerate's SeedableRandomSampler
        for number in torch.randperm(len(self._cuts), generator=generator).tolist():
            start, stop = self._cuts[number]
            yield order[start:stop]


def _cuts(lengths: list[int], max_tokens: int, processes: int) -> list[tuple[int, int]]:
    """(start, stop) of each batch in ascending lengths."""
    cuts, start = [], 0
    for stop in range(1, len(lengths) + 1):
        if stop == len(lengths) or (stop + 1 - start) * lengths[stop] > max_tokens:
            cuts.append((start, stop))
            start = stop
    while len(cuts) % processes:
        start, stop = max(cuts, key=lambda cut: cut[1] - cut[0])
        if stop - start < 2:
            break  # fewer samples than processes: accelerate repeats some
        cuts.remove((start, stop))
        cuts += [(start, (start + stop) // 2), ((start + stop) // 2, stop)]
    return cuts


def samples_within(max_tokens: int, length: int) -> int:
    """Count the samples of `length` tokens that fit into a batch, at least one."""
    return max(1, max_tokens // (-(-length // _MULTIPLE) * _MULTIPLE))
