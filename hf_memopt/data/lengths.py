"""How long samples are."""

import math


def relative_sizes(data, looked_at: float = math.inf) -> list[float]:
    """What samples take compared with each other: their tokens, or what a data set with `sizes()` says of itself.

    Args:
        looked_at: as in sample_lengths().
    """
    return data.sizes(looked_at) if hasattr(data, "sizes") else sample_lengths(data, looked_at)


def sample_lengths(data, looked_at: float = math.inf) -> list[int]:
    """Tokens of every sample; 1 where a sample has none.

    Args:
        looked_at: samples of a data set without columns that are looked at, one by one; 1 for the others.
    """
    columns = getattr(data, "column_names", None) or ()
    if "length" in columns:
        return list(data["length"])
    if "input_ids" in columns and getattr(data, "_indices", 0) is None:  # an Arrow table knows without reading tokens
        import pyarrow.compute

        return pyarrow.compute.list_value_length(data.data.column("input_ids")).to_pylist()

    def length(index: int) -> int:
        row = data[index]
        tokens = row.get("input_ids") if hasattr(row, "get") else row
        return len(tokens) if hasattr(tokens, "__len__") else 1

    return [length(index) if index < looked_at else 1 for index in range(len(data))]
