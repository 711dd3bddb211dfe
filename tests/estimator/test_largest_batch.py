"""The longest samples of a data set, and the batches that are made of them."""

from types import SimpleNamespace

import torch

from hf_memopt.estimator import largest_batch
from hf_memopt.estimator.largest_batch import _largest, _longest


class Rows(list):
    """Rows of so many tokens, or of texts under other names."""

    def __init__(self, lengths, column="input_ids"):
        super().__init__({column: [1] * length} for length in lengths)
        self.column_names = [column]


def collated(rows) -> dict:
    """Padded to the longest."""
    lengths = [len(next(iter(row.values()))) for row in rows]
    mask = torch.zeros(len(rows), max(lengths), dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask}


def test_the_longest_samples_and_shorter_ones_in_the_last_place(monkeypatch):
    for lengths, count, indices in [
        *(([3, 5, 5, 2], 1, [[1]]), ([3, 5, 5, 2], 2, [[1, 2], [1, 0], [1, 3]]), ([3, 5, 5, 2], 3, [[1, 2, 0]])),
        *(([4, 4], 5, [[0, 1, 0, 1, 0]]), ([5, 2], 2, [[0, 1]]), ([5, 5, 2], 2, [[0, 1], [0, 2]]), ([7], 1, [[0]])),
        *(([7], 3, [[0, 0, 0]]), ([2, 2, 1, 1], 2, [[0, 1], [0, 2], [0, 3]])),
    ]:
        assert _longest(Rows(lengths), collated, count) == indices, (lengths, count)
    monkeypatch.setattr(largest_batch, "_SAMPLED_ROWS", 3)
    assert _longest(Rows([1, 2, 3, 9]), collated, 1) == [[2]]
    monkeypatch.setattr(largest_batch, "_COLLATED_ROWS", 2)

    def reversing(rows):  # the shorter of the rows that are looked at makes the larger batch
        return {"x": torch.zeros(sum(10 - len(row["chosen"]) for row in rows))}

    pairs = Rows([4, 2, 3], "chosen")
    assert _longest(pairs, reversing, 1) == [[2]], "of the two longest"
    assert _longest(pairs, reversing, 2) == [[1, 2]], "of as many as two batches have"


def test_the_largest_batch_of_a_loader():
    def loader(lengths, **more):
        return SimpleNamespace(dataset=Rows(lengths), collate_fn=collated, **more)

    sampler = SimpleNamespace(batch_size=3)
    for given, shape, padded in [
        *((loader([2, 5, 3]), (2, 5), True), (loader([2, 5, 3], batch_size=1), (1, 5), False)),
        *((loader([2, 5, 3], batch_size=None, batch_sampler=sampler), (3, 5), True), (loader([4, 4]), (2, 4), False)),
        *((loader([4, 4, 1]), (2, 4), True), (loader([4, 4, 4]), (2, 4), False)),
    ]:
        found = _largest(given, 2)
        assert (tuple(found["input_ids"].shape), not bool(found["attention_mask"].all())) == (shape, padded)
    assert _largest(loader([4, 2, 2]), 2, budget=16)["input_ids"].shape == (2, 4)
    assert _largest(loader([4, 2, 2]), 2, budget=15)["input_ids"].shape == (1, 4)

    class Stream:
        def __init__(self, batches, **more):
            self.batches = batches
            vars(self).update(more)

        def __iter__(self):
            return iter(self.batches)

    assert _largest(Stream(["first", "second"]), 2) == "first" and _largest(Stream([]), 2) is None
    assert _largest(Stream(["first"], dataset=Rows([3])), 2) == "first", "nothing collates its rows"
    assert _largest(Stream(["first"], dataset=iter([3]), collate_fn=collated), 2) == "first", "rows without a number"

    def alike(rows):  # a collator that cannot pad
        assert len({len(row["input_ids"]) for row in rows}) == 1
        return collated(rows)

    unpadded = SimpleNamespace(dataset=Rows([4, 4, 1]), collate_fn=alike)
    assert bool(_largest(unpadded, 2)["attention_mask"].all())
