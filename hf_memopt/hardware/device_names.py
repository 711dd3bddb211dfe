"""Names of devices as people and drivers write them, and how many: matched with the catalog's."""

import functools
import logging
import re
from collections.abc import Iterable, Iterator, Mapping

from hf_memopt.errors import InputError, brief, choose, listed

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)
# Places and families that people name in the place of a device.
_ALIASES = {"colab": "t4", "mps": "apple", "metal": "apple", "apple silicon": "apple"}
_SPELLINGS = {"mobile": "laptop", "gen": "generation"}

# What a vendor or driver adds to a product's name, or leaves out of it, and what people add.
_VENDORS = {
    "nvidia": {"nvidia", "geforce", "tesla"},
    "amd": {"amd", "radeon", "instinct"},
    "intel": {"intel"},
    "cpu": {"amd", "intel"},
}
_BRANDS = set().union(*_VENDORS.values())
_FILLERS = {
    *("graphics", "edition", "generation", "gpu", "gpus", "card", "cards", "vram", "ram", "memory", "of", "with"),
    *("each", "unified", "desktop", "oam", "nvlink", "series"),
}
_NUMBERS = {
    **{"one": 1, "single": 1, "two": 2, "dual": 2, "pair": 2, "three": 3, "triple": 3, "four": 4, "quad": 4},
    **{"eight": 8, "sixteen": 16},
}
# Machines of AWS, Google and Azure, by what is in one. Written down from memory: g4dn, g5 and g6 up to 16xlarge were
# compared with the table in AWS Batch's documentation of GPU jobs, the others with nothing yet.
_MACHINES = {
    machine: cards
    for cards, machines in {
        "1x v100_sxm2_16gb": "p3.2xlarge nc6s_v3",
        "2x v100_sxm2_16gb": "nc12s_v3",
        "4x v100_sxm2_16gb": "p3.8xlarge nc24s_v3 nc24rs_v3",
        "8x v100_sxm2_16gb": "p3.16xlarge",
        "8x v100_32gb": "p3dn.24xlarge nd40rs_v2",
        "1x t4": "g4dn.xlarge g4dn.2xlarge g4dn.4xlarge g4dn.8xlarge g4dn.16xlarge "
        "nc4as_t4_v3 nc8as_t4_v3 nc16as_t4_v3",
        "4x t4": "g4dn.12xlarge nc64as_t4_v3",
        "8x t4": "g4dn.metal",
        "1x a10g": "g5.xlarge g5.2xlarge g5.4xlarge g5.8xlarge g5.16xlarge",
        "4x a10g": "g5.12xlarge g5.24xlarge",
        "8x a10g": "g5.48xlarge",
        "1x a10": "nv36ads_a10_v5 nv36adms_a10_v5",
        "2x a10": "nv72ads_a10_v5",
        "1x l4": "g6.xlarge g6.2xlarge g6.4xlarge g6.8xlarge g6.16xlarge "
        "g2-standard-4 g2-standard-8 g2-standard-12 g2-standard-16 g2-standard-32",
        "2x l4": "g2-standard-24",
        "4x l4": "g6.12xlarge g6.24xlarge g2-standard-48",
        "8x l4": "g6.48xlarge g2-standard-96",
        "1x l40s": "g6e.xlarge g6e.2xlarge g6e.4xlarge g6e.8xlarge g6e.16xlarge",
        "4x l40s": "g6e.12xlarge g6e.24xlarge",
        "8x l40s": "g6e.48xlarge",
        **{f"{n}x a100_40gb": f"a2-highgpu-{n}g" for n in (1, 2, 4)},
        "8x a100_40gb": "p4d.24xlarge a2-highgpu-8g nd96asr_v4",
        "16x a100_40gb": "a2-megagpu-16g",
        **{f"{n}x a100_80gb": f"a2-ultragpu-{n}g" for n in (1, 2, 4)},
        "8x a100_80gb": "p4de.24xlarge a2-ultragpu-8g nd96amsr_a100_v4",
        "1x a100_pcie_80gb": "nc24ads_a100_v4",
        "2x a100_pcie_80gb": "nc48ads_a100_v4",
        "4x a100_pcie_80gb": "nc96ads_a100_v4",
        "1x h100_80gb": "p5.4xlarge a3-highgpu-1g",
        "2x h100_80gb": "a3-highgpu-2g",
        "4x h100_80gb": "a3-highgpu-4g",
        "8x h100_80gb": "p5.48xlarge a3-highgpu-8g a3-megagpu-8g a3-edgegpu-8g nd96isr_h100_v5",
        "1x h100_nvl_94gb": "nc40ads_h100_v5",
        "2x h100_nvl_94gb": "nc80adis_h100_v5",
        "8x h200": "p5e.48xlarge p5en.48xlarge a3-ultragpu-8g nd96isr_h200_v5",
        "8x b200": "p6-b200.48xlarge a4-highgpu-8g",
        "8x mi300x": "nd96isr_mi300x_v5",
    }.items()
    for machine in machines.split()
}
_CLOUDS = "(?:aws|amazon|ec2|gcp|google(?: cloud)?|azure)"
_GB = r"g(?:i?b|igs?|igabytes?)?s?"
_SIZE = re.compile(rf"(\d+)[\s_-]*{_GB}\b")
# What a text says otherwise than the rest of this file reads it, in the order of reading.
_REWRITTEN = [
    (re.compile(pattern, re.IGNORECASE), new)
    for pattern, new in (
        (
            rf"(?<![\w.-])(?:{_CLOUDS}[\s_-]+)?(?:standard_)?({'|'.join(map(re.escape, _MACHINES))})(?![\w.-])"
            rf"(?:\s*\({_CLOUDS}\))?",
            lambda found: _MACHINES[found[1].lower()],
        ),
        (r"\bgpu_(\d)x_(?=\w)", r"\1x "),  # Lambda's
        (r"\((?:r|tm)\)|\bhbm\d\w?\b|(?<![a-z])w/", " "),
        (r"^my\s+", ""),
        # A place may stand beside a device's own name ("colab t4", "MacBook Air M2"), which then says it all.
        (r"^(?:google )?(?:colab|kaggle)[ _-]+(?!pro)(?=\S)|\s*\((?:google )?(?:colab|kaggle)\)$", ""),
        (r"(?<![a-z])(?:apple )?i?mac(?:book)?(?:[ _-]*(?:air|pro|mini|studio))?(?![a-z])", "apple"),
        (r"[(\s-]*\b\d+[\s_-]*cores?\b(?:[\s_-]*gpu)?\)?", " "),  # Apple's chips: no name, and no count
        (r"(?<!\d)(\d{4,6})[\s_-]*mi?b\b", lambda found: f"{round(int(found[1]) / 1024)}gb"),
        (r"(?<!\d)(\d{4})m\b", r"\1 laptop"),
        (r"tisuper\b", "ti super"),
        (
            rf"^(?:a )?({'|'.join(_NUMBERS)})[\s_-]+(?=\S)",
            lambda found: f"{_NUMBERS[found[1].lower()]}x ",
        ),
        # "A100x8 80GB": the count comes last.
        (rf"^(.+?)((?:(?<=\d)|[\s_-]+)[x×*]\s*\d{{1,3}})([\s_-]+\(?\d+\s*{_GB}\)?)$", r"\1\3\2"),
    )
]
_N = r"(?P<count>-?\d+)"
_UNITS = r"(?:gpus?|cards?|pcs|pieces|ways?)"
# 2x, 2 x, (2x); 4090x2, 4090 (x2); 4090 2x
_TIMES = (
    rf"\(?{_N}[\s_-]*[x×*]\)?[\s_-]*(?P<card>.+)",
    rf"(?P<card>.+?)(?:-[x×*]-|[\s_,-]*[(\[]?[x×*][\s_]*){_N}[)\]]?",
    rf"(?P<card>.+?)(?:[\s_]+|-)\(?{_N}[\s_-]*[x×*]\)?",
)
# 2 of, 2 GPUs, 2 nodes of; x2 4090; 4090 (2 GPUs)
_COUNTED = (
    *_TIMES,
    rf"{_N}[\s_-]*(?:{_UNITS}|nodes?|machines?|of)[\s_-]+(?:of[\s_-]+)?(?P<card>.+)",
    rf"[x×*][\s_]*{_N}[\s_-]+(?P<card>.+)",
    rf"(?P<card>.+?)(?:[\s_]+|[\s_]*[,:@(\[-][\s_]*)\(?{_N}[\s_-]*{_UNITS}[)\]]?",
)
# "8 H100s", "8h100", "h100:8", "h100 (8)"
_BARE_COUNTS = (
    rf"(?P<count>\d{{1,4}})[\s_,-]*(?![\s_,.\d-]|{_GB}\b|[x×*])(?P<card>.+)",
    r"(?P<count>\d{1,4})[\s_,-]+(?P<card>\d.+)",
    r"(?P<card>.+?)[\s_]*[:@,(\[][\s_]*(?P<count>\d{1,3})[)\]]?",
)
_TRAILING = re.compile(r"(.+?)[\s_-]+(\d{1,3})")  # a count or a size
_BARE_SIZE = re.compile(r"(?=.*(?:[a-z].*\d|\d{4}).*[\s_-]\d)(.*[a-z\d)])(?<![\s_-]x)[\s_-]+(\d{1,3})", re.IGNORECASE)
_TOGETHER = re.compile(r"\s*(?:[,;&+|/]|\band\b|\bor\b)\s*")
MOST_DEVICES = 1024  # that a name may count; more is rather a slip
_FAMILY = 6  # more devices than this do not share a name without a number: it is a series ("rtx", "laptop")
_SHOWN = 8  # names in a message


@functools.lru_cache(4096)
def _plain(text: str) -> str:
    """A text with the words that the patterns and the catalog use."""
    for pattern, new in _REWRITTEN:
        text = pattern.sub(new, text)
    return text.strip()


def _parts(name: str) -> list[str]:
    """The words and numbers of a name, those of its memory left out."""
    text = re.sub(r"sxm\d\b", " sxm", _SIZE.sub(" ", name))  # else "4 A100" had all its tokens in "A100 SXM4"
    return [_SPELLINGS.get(part, part) for part in re.findall(r"[a-z]+|\d+", text)]


@functools.lru_cache(4096)
def tokens(name: str) -> frozenset[str]:
    """The parts of a product's name that tell it from others: "RTX 4060Ti 16GB" -> rtx, 4060, ti, 16gb."""
    text = _plain(name).lower().replace("_", " ")
    return frozenset({f"{size}gb" for size in _SIZE.findall(text)} | (set(_parts(text)) - _BRANDS - _FILLERS))


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
        others = listed([key for key in closest if key != smallest], _SHOWN)
        text = "hardware=%s is taken as %s, the smallest of its name; there are also %s"
        _warn_once(text, name, smallest, others)
    return smallest


def names_meant(name: str, devices: Mapping) -> list[str]:
    """The catalog's names that a name may stand for: those with all its tokens and, where one is a number, the fewest
    others."""
    if name in devices:
        return [name]
    words = _words(name)
    found = _matching(name, devices)
    if not found and (sized := _BARE_SIZE.fullmatch(_plain(name))):  # "a100 80"
        words = _words(f"{sized[1]} {sized[2]}gb")
        found = _matching(f"{sized[1]} {sized[2]}gb", devices)
    if not found:
        return [key for key, device in devices.items() if device.reported and _is_reported(name, device)]
    if "apple" not in words and not any(word.isdecimal() for word in words):  # "jetson": none is nearer than another
        return sorted(found)
    # The distance of a name from a device's; a size left out counts less than a "Ti" or "Laptop".
    # The catalog leaves "sxm" out where it is the usual form: "v100" is the one of 16 GB as well.
    distances = {
        key: sum(0.5 if token.endswith("gb") else 1 for token in tokens(key) - words - {"sxm"}) for key in found
    }
    return sorted(key for key, distance in distances.items() if distance == min(distances.values()))


def counted(text: str, devices: Mapping) -> tuple[str, int]:
    """A name without the number of devices in it, and this number: ("h100", 8) of "8x H100", "H100x8" and "8 H100s".

    The digits of a card's own name are no count: of the ways to read "4090x2" only one names a card.

    Raises:
        InputError: fewer than one or more than MOST_DEVICES, several cards, or two ways to read it.
    """
    if _is_named(text, devices):
        return text, 1
    plain = _plain(text)
    readings = list(_readings(plain, devices, _COUNTED))
    named = any(_is_named(card, devices) for card, count in readings if count <= MOST_DEVICES)
    for card, count in () if named else _readings(plain, devices, _BARE_COUNTS):
        if count <= MOST_DEVICES:
            if any(_size_of(devices[key]) == count for key in names_meant(card, devices)):
                raise InputError(_count_or_size(text, card, count, devices))
            readings.append((card, count))
    named = [reading for reading in readings if _is_named(reading[0], devices)]
    usual = {
        (*names_meant(card, devices), count): (card, count) for card, count in named if 1 <= count <= MOST_DEVICES
    }
    if len(usual) > 1:
        ways = " or ".join(f"'{count}x {card}'" for card, count in usual.values())
        raise InputError(f"hardware={brief(text)}: which of the numbers is the count? Write {ways}")
    if usual:
        return next(iter(usual.values()))
    if named:
        card, count = named[0]
        if count < 1:
            raise InputError(f"hardware={text}: the number of devices must be at least 1")
        raise InputError(
            f"hardware={text}: {count:,} devices in a name are more than {MOST_DEVICES:,}: write --hardware "
            f"{card!r} --world-size {count}"
        )
    if together := _together(text, devices):
        return together
    if (trailing := _TRAILING.fullmatch(plain)) and _is_named(trailing[1], devices):
        raise InputError(_count_or_size(text, trailing[1], int(trailing[2]), devices))
    # A number or size alone is asked about, and what is no name at all refused, without its count.
    likely = [(card, count) for card, count in readings if 1 <= count <= MOST_DEVICES and re.search(r"\d", card)]
    return min(likely, key=lambda reading: reading[0].isdecimal(), default=(text, 1))


def _readings(plain: str, devices: Mapping, patterns: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Every way to read a text as a card and a count."""
    for found in filter(None, (re.fullmatch(pattern, plain, re.IGNORECASE) for pattern in patterns)):
        card, count = _singular(found["card"].strip(" (-_,"), devices), int(found["count"][:9])
        yield card, count
        if found.start("count") < found.start("card"):  # 2x 8xH100, 2 nodes of H100x8
            yield from ((inner, count * times) for inner, times in _readings(card, devices, _TIMES))


def _singular(card: str, devices: Mapping) -> str:
    """A counted card with the letter that is its own: V100 of "8x V100s", MI300X of "MI300x8"."""
    found, words = names_meant(card, devices), _words(card)
    if card.endswith("s") and not any(tokens(key) <= words for key in found) and names_meant(card[:-1], devices):
        return card[:-1]
    narrower = names_meant(f"{card}x", devices)
    return f"{card}x" if narrower and set(narrower) < set(found) else card


def _count_or_size(text: str, card: str, count: int, devices: Mapping) -> str:
    sold = any(_size_of(devices[key]) == count for key in names_meant(card, devices))
    or_size, sized = (f", or {count} GB", f" or '{card} {count}GB'") if sold else ("", "")
    return f"hardware={brief(text)}: {count} of them{or_size}? Write '{count}x {card}'{sized}"


def _together(text: str, devices: Mapping) -> tuple[str, int] | None:
    """The sum of cards that are named one after the other; None if the parts of a text are not all cards."""
    parts = [part for part in _TOGETHER.split(text.strip().lower()) if part]
    cards = [counted(part, devices) for part in parts] if len(parts) > 1 else []
    if not cards or not all(_is_named(card, devices) for card, _ in cards):
        return None
    names = list(dict.fromkeys(names_meant(card, devices)[0] for card, _ in cards))
    if len(names) == 1:
        return cards[0][0], sum(count for _, count in cards)
    raise InputError(
        f"hardware={brief(text)} is {len(cards)} names of cards ({', '.join(names)}), and devices that train together "
        "are of one kind: ask about each, or about '2x' the smaller one"
    )


def _words(name: str) -> frozenset[str]:
    """The tokens of a name as people write it, with its vendor's."""
    plain = _plain(name.lower())
    return tokens(_ALIASES.get(plain, plain)) | (_BRANDS & set(_parts(plain)))


def _matching(name: str, devices: Mapping) -> list[str]:
    """The devices that have all words of a name. None has one twice: of "4 T4" and "T4 T4", one
    is a count."""
    parts = [part for part in _parts(_plain(name.lower())) if part not in _FILLERS | {"apple"}]
    return _containing(_words(name), devices) if len(parts) == len(set(parts)) else []


def _containing(words: frozenset[str], devices: Mapping) -> list[str]:
    """The devices whose name, label, vendor and memory have all words; a plural's s is no word. A letter alone
    names none: "rx 580" is not 580 of "r"."""
    found = [
        key
        for key, device in devices.items()
        if words <= _tokens_of(key, device.label, device.vendor, _size_of(device))
        and len("".join(words - _BRANDS)) > 1
    ]
    return found if found or "s" not in words else _containing(words - {"s"}, devices)


def _is_reported(name: str, device) -> bool:
    """True if a driver reports this name: nothing else stands in it, as a count would."""
    rest = re.sub(device.reported, " ", name, count=1, flags=re.IGNORECASE)
    return rest != name and not _words(rest) - _VENDORS[device.vendor]


@functools.lru_cache(4096)
def _tokens_of(key: str, label: str, vendor: str, size: int) -> frozenset[str]:
    return tokens(f"{key} {label}") | {f"{size}gb"} | _VENDORS.get(vendor, set())


def _size_of(device) -> int:
    """GB, as printed on the box."""
    return round(device.nominal_memory / 2**30)


def _is_named(name: str, devices: Mapping) -> bool:
    """True if a text names a device, or several of one name."""
    return bool(names_meant(name, devices)) and _question(name, devices) is None


def _question(name: str, devices: Mapping) -> str | None:
    """What to ask about a name that is a number, a size or a series alone; None where it names a device."""
    words = _words(name) - _BRANDS
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
    elif not found and len(numbers) == 1 and (series := _series(words, *numbers, devices=devices)):
        found = series
    elif numbers or len(found) <= _FAMILY:
        return None
    kind = f" With {max(sizes)[:-2]} GB there are" if words == sizes and found else ""
    cards = listed(found, _SHOWN) if found else "`hf-memopt presets` lists some"
    return f"hardware={brief(name)}: which card?{kind} {cards}"


def _series(words: frozenset[str], number: str, devices: Mapping) -> list[str]:
    """The cards of "rtx 30": their four digits begin with it."""
    return [key for key in _containing(words - {number}, devices) if re.search(rf"_{number}\d\d(_|$)", key)]


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
