"""Batches by tokens: as many samples as stay within a budget of padded tokens, instead of a number of samples."""

from collections.abc import Iterator, Sequence

import torch

from hf_memopt.errors import InputError

_MULTIPLE = 8  # collators pad to it; samples of nearly one length change places


class TokenBudgetBatches(torch.utils.data.BatchSampler):
    """Batches of samples of nearly equal length, none of more padded tokens than the budget.

    The same sorted lengths are cut at the same places in every epoch, so that the number of batches stays what it is;
    samples of one length change places, and the order of batches changes. The number of batches is a multiple of the
    processes, so that each takes as many steps: the batches with most samples are halved until it is.

    Args:
        sampler: gives the samples in an epoch's order; accelerate sets its `epoch`.
        lengths: tokens of every sample.
        max_tokens: samples × longest sample of a batch, at most.
        processes: that the batches are dealt to, one after the other.
        seed: of the order of the batches; the order within them is the sampler's.

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
        shuffled = torch.randperm(len(self._cuts), generator=generator).tolist()
        for number in shuffled:
            start, stop = self._cuts[number]
            yield order[start:stop]


def _cuts(lengths: list[int], max_tokens: int, processes: int) -> list[tuple[int, int]]:
    """Where ascending lengths are cut: (from, to) of every batch."""
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
    """Samples of so many tokens in a batch."""
    return max(1, max_tokens // (-(-length // _MULTIPLE) * _MULTIPLE))
