"""Numbers and bytes in the units that people read and write."""

import math
import re

MIB = 2**20
GIB = 2**30

_NUMBER = re.compile(
    r"(?P<digits>[-+]?(?:\d{1,3}(?:,\d{3})+|\d[\d_]*)?(?:\.\d+)?(?:e[-+]?\d{1,3})?)\s*(?P<scale>(?:[kmbgt]|bn)(?![a-z])|)"
    r"\s*(?P<of>[a-z]*)",
    re.IGNORECASE,
)
# Words behind a number, without their s, and names of what is counted in them.
_COUNTED_IN = {
    **dict.fromkeys(("token", "tok"), "length|_len|tokens|positions|chunk_size|tile_size|block_size"),
    **dict.fromkeys(("sample", "row", "pair"), "samples|batch|rows|held_out"),
    **dict.fromkeys(("gpu", "card", "device"), "world_size|devices"),
    **{"step": "steps", "frame": "frames", "node": "machines", "machine": "machines", "epoch": "epochs"},
}
_POWERS = {"": 0, "k": 1, "m": 2, "b": 3, "bn": 3, "g": 3, "t": 4}
_BYTES = re.compile(r"(?P<digits>\d[\d_]*(?:\.\d+)?)\s*(?P<scale>[kmgt])(?P<binary>i?)b?(?:ytes?)?", re.IGNORECASE)


def read_number(text: str, thousand: int = 1000, of: str = "") -> float | None:
    """A number as people write it: 10M, 2.5B, 300k, 1e9, 2,048, 1_000_000, "2k tokens"; None of any other text.

    Args:
        thousand: of k; 1024 for lengths, whose 8k are 8,192 tokens.
        of: the name of what is counted, which says the words that may follow: tokens none of samples.
    """
    parts = _NUMBER.fullmatch(str(text).strip())
    word = parts["of"].lower().removesuffix("s") if parts else ""
    if word and not (of and word in _COUNTED_IN and re.search(_COUNTED_IN[word], of)):
        return None
    if not parts or not re.search(r"\d", parts["digits"].partition("e")[0]):
        return None
    number = float(re.sub("[_,]", "", parts["digits"])) * thousand ** _POWERS[parts["scale"].lower()]
    return number if math.isfinite(number) else None


def read_bytes(text: str) -> float | None:
    """Bytes as people write them: 24GB (10**9), 24 GiB (2**30), 512M; None of a text without a unit."""
    parts = _BYTES.fullmatch(str(text).strip())
    if not parts:
        return None
    unit = 1024 if parts["binary"] else 1000
    return float(parts["digits"].replace("_", "")) * unit ** _POWERS[parts["scale"].lower()]


def size(value: float | None, beside: float = 0) -> str:
    """Bytes as text, in the largest of GiB, MiB and KiB that makes at least one.

    Args:
        beside: bytes whose unit the text has, too, unless it would be zero in that.
    """
    if value is None:
        return "unknown"
    for unit, factor, digits in (("GiB", GIB, 2), ("MiB", MIB, 1), ("KiB", 2**10, 1)):
        if max(abs(value), beside) >= factor and round(value / factor, digits):
            return f"{value / factor:,.{digits}f} {unit}"
    return f"{value:.0f} B"


def gib(value: int | None) -> str:
    """Bytes as text in GiB."""
    return "unknown" if value is None else f"{value / GIB:.2f} GiB"
