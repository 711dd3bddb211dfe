"""Lengths of samples."""

import math


def relative_sizes(data, max_samples: float = math.inf) -> list[float]:
    """Sizes by which samples compare: their tokens, or the result of the dataset's own `sizes()`.

    Args:
        max_samples: as in sample_lengths().
    """
    return data.sizes(max_samples) if hasattr(data, "sizes") else sample_lengths(data, max_samples)


def sample_lengths(data, max_samples: float = math.inf) -> list[int]:
    """Tokens of every sample; 1 where a sample has no tokens.

    Args:
        max_samples: of a dataset without columns, how many samples to load; the others count as 1.
    """
    columns = getattr(data, "column_names", None) or ()
    if "length" in columns:
        return list(data["length"])
    if (
        "input_ids" in columns and getattr(data, "_indices", 0) is None
    ):  # Arrow stores list lengths, so no token is read
        import pyarrow.compute

        return pyarrow.compute.list_value_length(data.data.column("input_ids")).to_pylist()

    def length(index: int) -> int:
        row = data[index]
        tokens = row.get("input_ids") if hasattr(row, "get") else row
        return len(tokens) if hasattr(tokens, "__len__") else 1

    return [length(index) if index < max_samples else 1 for index in range(len(data))]
