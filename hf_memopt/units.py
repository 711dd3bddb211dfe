"""Bytes in the units that people read."""

MIB = 2**20
GIB = 2**30


def gib(value: int | None) -> str:
    """Bytes as text in GiB."""
    return "unknown" if value is None else f"{value / GIB:.2f} GiB"
