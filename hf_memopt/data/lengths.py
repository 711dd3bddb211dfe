"""Lengths of samples."""

import math
from collections.abc import Mapping
from typing import Any

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
