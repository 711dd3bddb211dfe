"""Bytes in the units that people read."""

MIB = 2**20
GIB = 2**30


def size(value: float | None) -> str:
    """Bytes as text, in the largest of GiB, MiB and KiB that makes at least one."""
    if value is None:
        return "unknown"
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if abs(value) >= factor:
            return f"{value / factor:,.{2 if unit == 'GiB' else 1}f} {unit}"
    return f"{value:.0f} B"


def gib(value: int | None) -> str:
    """Bytes as text in GiB."""
    return "unknown" if value is None else f"{value / GIB:.2f} GiB"
