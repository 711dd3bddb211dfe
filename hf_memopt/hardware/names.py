"""Names of devices as people and drivers write them, matched with the catalog's."""

import functools
import logging
import re
from collections.abc import Mapping

from hf_memopt.errors import InputError, choose, listed

logger = logging.getLogger(__name__)
# Places and families that people name in the place of a device.
_ALIASES = {"colab": "t4", "mps": "apple", "metal": "apple", "apple silicon": "apple"}
# They may stand before a device's own name ("colab t4", "MacBook Air M2"), which then says it all.
_PLACE = re.compile(r"^(?:google )?(?:colab|kaggle)[ _-]+(?!pro)(?=\S)")
_MAC = re.compile(r"^(?:apple )?i?mac(?:book)?(?:[ _-]*(?:air|pro|mini|studio))?(?![a-z])")

# What a vendor or driver adds to a product's name, or leaves out of it.
_BRANDS = {
    "nvidia",
    "geforce",
    "tesla",
    "amd",
    "radeon",
    "instinct",
    "intel",
    "gpu",
    "graphics",
    "edition",
    "generation",
}
_SIZE = re.compile(r"(\d+)[\s_-]*g(?:i?b)?\b")


def tokens(name: str) -> frozenset[str]:
    """The parts of a product's name that tell it from others: "RTX 4060Ti 16GB" -> rtx, 4060, ti, 16gb."""
    text = re.sub(r"\((?:r|tm)\)", " ", name.lower()).replace("_", " ")
    sizes = {f"{size}gb" for size in _SIZE.findall(text)}
    parts = re.findall(r"[a-z]+|\d+", _SIZE.sub(" ", text))
    return frozenset(sizes | (set(parts) - _BRANDS))


def product(name: str) -> frozenset[str]:
    """The tokens of a label or reported name without memory sizes and what is in parentheses."""
    bare = re.sub(r"\((?!R\)|TM\))[^)]*\)", " ", name)
    return frozenset(token for token in tokens(bare) if not re.fullmatch(r"\d+gb", token))


def short_name(name: str) -> str:
    """The catalog's spelling: "PRO 6000 Blackwell Max-Q Workstation Edition" -> pro_6000_max_q_workstation."""
    bare = re.sub(r"\([^)]*\)|\b(?:Blackwell|Edition)\b", " ", name)
    return "_".join(re.sub(r"(\d+) GB", r"\1gb", bare).replace("-", " ").lower().split())


def match(name: str, devices: Mapping) -> str:
    """The catalog's name for a name as people write it.

    Args:
        devices: catalog name -> Hardware.

    Returns:
        Of several devices that it may stand for the one with the least memory: what fits there fits the others. A
        line says so.

    Raises:
        InputError: no device has such a name.
    """
    closest = candidates(name, devices)
    if not closest:
        raise InputError(
            f"{choose('hardware', name, [*devices, 'auto'])} Another device can be described: see docs/plans.md."
        )
    smallest = min(closest, key=lambda key: devices[key].memory)
    if len(closest) > 1:
        others = [key for key in closest if key != smallest]
        _say_which(name, smallest, listed(others, 3))
    return smallest


@functools.cache
def _say_which(name: str, smallest: str, others: str) -> None:
    logger.warning("hardware=%s is taken as %s, the smallest of its name; there are also %s", name, smallest, others)


def candidates(name: str, devices: Mapping) -> list[str]:
    """The catalog's names that a name may stand for: those with all its tokens and the fewest others."""
    plain = _MAC.sub("apple", _PLACE.sub("", name.strip().lower()))
    words = tokens(_ALIASES.get(plain, plain))
    distances = {
        key: _distance(tokens(key) - words)
        for key, device in devices.items()
        if words and words <= tokens(f"{key} {device.label}")
    }
    return sorted(key for key, distance in distances.items() if distance == min(distances.values()))


def counted(name: str) -> tuple[str, int]:
    """A name without the number of devices in it, and this number: ("H100", 8) of "8x H100" and "H100x8"."""
    if leading := re.fullmatch(r"(\d+)\s*[x×*]\s*(.+)", name):
        return leading[2], int(leading[1])
    if trailing := re.fullmatch(r"(.+?)[_\s]*[x×*]\s*(\d+)", name):
        return trailing[1], int(trailing[2])
    return name, 1


def _distance(missing: frozenset[str]) -> float:
    """The distance of a name from a device's; a size left out counts less than a "Ti" or "Laptop"."""
    return sum(0.5 if token.endswith("gb") else 1 for token in missing)
