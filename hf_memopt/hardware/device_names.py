"""Names of devices as people and drivers write them, and how many: matched with the catalog's."""

import functools
import logging
import re
from collections.abc import Iterator, Mapping

from hf_memopt.errors import InputError, brief, choose, listed

logger = logging.getLogger(__name__)
# Places and families that people name in the place of a device.
_ALIASES = {"colab": "t4", "mps": "apple", "metal": "apple", "apple silicon": "apple"}
# They may stand before a device's own name ("colab t4", "MacBook Air M2"), which then says it all.
_PLACE = re.compile(r"^(?:google )?(?:colab|kaggle)[ _-]+(?!pro)(?=\S)")
_MAC = re.compile(r"(?<![a-z])(?:apple )?i?mac(?:book)?(?:[ _-]*(?:air|pro|mini|studio))?(?![a-z])")
_SPELLINGS = {"mobile": "laptop", "gen": "generation"}

# What a vendor or driver adds to a product's name, or leaves out of it, and what people add.
_BRANDS = {
    *("nvidia", "geforce", "tesla", "amd", "radeon", "instinct", "intel", "graphics", "edition", "generation"),
    *("gpu", "gpus", "card", "cards", "vram", "ram", "memory", "of", "with"),
}
_SIZE = re.compile(r"(\d+)[\s_-]*g(?:i?b)?s?\b")
# 2x, x2, 2 x, x 2, with * or × for x; before the name, or after it.
_COUNTED = (
    re.compile(r"(?P<count>-?\d+)\s*[x×*]\s*(?P<card>.+)"),
    re.compile(r"[x×*]\s*(?P<count>-?\d+)\s+(?P<card>.+)"),
    re.compile(r"(?P<card>.+?)[\s_-]*\(?[x×*]\s*(?P<count>-?\d+)\)?"),
    re.compile(r"(?P<card>.+?)[\s_]+\(?(?P<count>-?\d+)\s*[x×*]\)?"),
)
_BARE_COUNT = re.compile(r"(?P<count>\d{1,4})\s+(?!gi?b?\b|[x×*])(?P<card>.+)")  # "8 H100s"
_BARE_SIZE = re.compile(r"(.*[A-Za-z].*)[\s_-](\d{1,3})")
_TOGETHER = re.compile(r"\s*(?:[,;&+|/]|\band\b|\bor\b)\s*")
MOST_DEVICES = 1024  # that a name may count; more is rather a slip
_FAMILY = 6  # more devices than this do not share a name without a number: it is a series ("rtx", "laptop")
_SHOWN = 8  # names in a message


def tokens(name: str) -> frozenset[str]:
    """The parts of a product's name that tell it from others: "RTX 4060Ti 16GB" -> rtx, 4060, ti, 16gb."""
    text = re.sub(r"\((?:r|tm)\)", " ", name.lower()).replace("_", " ")
    text = re.sub(r"sxm\d\b", " sxm", text)  # else "4 A100" had all its tokens in "A100 SXM4"
    sizes = {f"{size}gb" for size in _SIZE.findall(text)}
    parts = (_SPELLINGS.get(part, part) for part in re.findall(r"[a-z]+|\d+", _SIZE.sub(" ", text)))
    return frozenset(sizes | (set(parts) - _BRANDS))


def product(name: str) -> frozenset[str]:
    """The tokens of a label or reported name without memory sizes and what is in parentheses."""
    bare = re.sub(r"\((?!R\)|TM\))[^)]*\)", " ", name)
    return frozenset(token for token in tokens(bare) if not _is_size(token))


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
        InputError: no device has such a name, or it is a number, a size or a series, which names none.
    """
    if question := _question(name, devices):
        raise InputError(question)
    closest = names_meant(name, devices)
    if not closest:
        raise InputError(_no_such(name, devices))
    smallest = min(closest, key=lambda key: devices[key].memory)
    if len(closest) > 1:
        others = [key for key in closest if key != smallest]
        _say_which(name, smallest, listed(others, _SHOWN))
    return smallest


@functools.cache
def _say_which(name: str, smallest: str, others: str) -> None:
    logger.warning("hardware=%s is taken as %s, the smallest of its name; there are also %s", name, smallest, others)


def names_meant(name: str, devices: Mapping) -> list[str]:
    """The catalog's names that a name may stand for: those with all its tokens and, where one is a number, the fewest
    others."""
    if name in devices:
        return [name]
    words = _words(name)
    found = _containing(words, devices)
    if not found and (sized := _BARE_SIZE.fullmatch(name.strip())):  # "a100 80"
        words = _words(f"{sized[1]} {sized[2]}gb")
        found = _containing(words, devices)
    if "apple" not in words and not any(word.isdecimal() for word in words):  # "jetson": none is nearer than another
        return sorted(found)
    # The distance of a name from a device's; a size left out counts less than a "Ti" or "Laptop".
    distances = {key: sum(0.5 if token.endswith("gb") else 1 for token in (tokens(key) - words)) for key in found}
    return sorted(key for key, distance in distances.items() if distance == min(distances.values()))


def counted(text: str, devices: Mapping) -> tuple[str, int]:
    """A name without the number of devices in it, and this number: ("h100", 8) of "8x H100", "H100x8" and "8 H100s".

    The digits of a card's own name are no count: of the ways to read "4090x2" only one names a card.

    Raises:
        InputError: fewer than one or more than MOST_DEVICES, several cards, or two ways to read it.
    """
    if _is_named(text, devices):
        return text, 1
    readings = list(dict.fromkeys(_readings(text, devices)))
    named = [reading for reading in readings if _is_named(reading[0], devices)]
    usual = [reading for reading in named if 1 <= reading[1] <= MOST_DEVICES]
    if len(usual) > 1:
        ways = " or ".join(f"'{count}x {card}'" for card, count in usual)
        raise InputError(f"hardware={brief(text)}: which of the numbers is the count? Write {ways}")
    if usual:
        return usual[0]
    if named:
        card, count = named[0]
        if count < 1:
            raise InputError(f"hardware={text}: the number of devices must be at least 1")
        raise InputError(
            f"hardware={text}: {count:,} devices in a name are more than {MOST_DEVICES:,}: write --hardware "
            f"{card!r} --world-size {count}"
        )
    _refuse_several_cards(text, devices)
    # A number or size alone is asked about, and what is no name at all refused, without its count.
    likely = [reading for reading in readings if 1 <= reading[1] <= MOST_DEVICES]
    return min(likely, key=lambda reading: reading[0].isdecimal(), default=(text, 1))


def _readings(text: str, devices: Mapping) -> Iterator[tuple[str, int]]:
    plain = text.strip().lower()
    for pattern in _COUNTED:
        if found := pattern.fullmatch(plain):
            yield found["card"].strip(), int(found["count"][:9])
    if (found := _BARE_COUNT.fullmatch(plain)) and int(found["count"]) <= MOST_DEVICES:
        card, count = found["card"], int(found["count"])
        if any(_size_of(devices[key]) == count for key in names_meant(card, devices)):
            raise InputError(
                f"hardware={brief(text)}: {count} of them, or {count} GB? Write '{count}x {card}' or '{card}'"
            )
        yield card, count


def _refuse_several_cards(text: str, devices: Mapping) -> None:
    parts = [part for part in _TOGETHER.split(text.strip().lower()) if part]
    if len(parts) < 2:
        return
    cards = [counted(part, devices)[0] for part in parts]
    if all(_is_named(card, devices) for card in cards):
        names = ", ".join(dict.fromkeys(names_meant(card, devices)[0] for card in cards))
        raise InputError(
            f"hardware={brief(text)} is {len(cards)} names of cards ({names}), and devices that train together are "
            "of one kind: ask about each, or about '2x' the smaller one"
        )


def _words(name: str) -> frozenset[str]:
    plain = _MAC.sub("apple", _PLACE.sub("", name.strip().lower()))
    return tokens(_ALIASES.get(plain, plain))


def _containing(words: frozenset[str], devices: Mapping) -> list[str]:
    """The devices whose name, label and memory have all words; a plural's s is no word."""
    found = [
        key for key, device in devices.items() if words and words <= _tokens_of(key, device.label, _size_of(device))
    ]
    return found if found or "s" not in words else _containing(words - {"s"}, devices)


@functools.cache
def _tokens_of(key: str, label: str, size: int) -> frozenset[str]:
    return tokens(f"{key} {label}") | {f"{size}gb"}


def _size_of(device) -> int:
    """GB, as printed on the box."""
    return round(device.nominal_memory / 2**30)


def _is_named(name: str, devices: Mapping) -> bool:
    """True if a text names a device, or several of one name."""
    if name in devices:
        return True
    numbers = re.findall(r"\d+", _SIZE.sub(" ", name))
    if len(numbers) > len(set(numbers)):  # "4 T4": one of them is a count
        return False
    return bool(names_meant(name, devices)) and _question(name, devices) is None


def _question(name: str, devices: Mapping) -> str | None:
    """What to ask about a name that is a number, a size or a series alone; None where it names a device."""
    words = _words(name)
    if name in devices or not words or "apple" in words:
        return None
    numbers = {word for word in words if word.isdecimal()}
    sizes = {word for word in words if _is_size(word)}
    found = _containing(words, devices)
    if words == numbers:
        # A desktop card's four digits are its name (4090); "16" is as well a size, and "6000" is of several series.
        closest = {product(key) for key in names_meant(name, devices)}
        if len(closest) == 1 and len(max(numbers, key=len)) > 3:
            return None
        found = [*found, *(key for key in _of_size(devices, *numbers) if key not in found)]
        if not found:
            return None
    elif words == sizes:
        found = _of_size(devices, *(size.removesuffix("gb") for size in sizes))
    elif numbers or len(found) <= _FAMILY:
        return None
    kind = f" With {max(sizes)[:-2]} GB there are" if words == sizes and found else ""
    cards = listed(found, _SHOWN) if found else "`hf-memopt presets` lists some"
    return f"hardware={brief(name)}: which card?{kind} {cards}"


def _of_size(devices: Mapping, *sizes: str) -> list[str]:
    return [key for key, device in devices.items() if str(_size_of(device)) in sizes]


def _no_such(name: str, devices: Mapping) -> str:
    """The sentence about a name that no device has; a card that is not sold with a memory is named with its own."""
    words = _words(name)
    sizes = {word for word in words if _is_size(word)}
    if sizes and (found := _containing(words - sizes, devices)) and any(word.isdecimal() for word in words):
        sold = (f"{key} ({_size_of(devices[key])} GB)" for key in found)
        return f"hardware={brief(name)}: no such card has {max(sizes)[:-2]} GB; there are {listed([*sold], _SHOWN)}"
    return f"{choose('hardware', name, [*devices, 'auto'])} Another device can be described: see docs/plans.md."


def _is_size(token: str) -> bool:
    return bool(re.fullmatch(r"\d+gb", token))
