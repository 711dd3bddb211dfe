"""The user's price table: a TOML file with what an hour of each card costs. None is shipped."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hf_memopt.errors import InputError, brief, one_line
from hf_memopt.files import read_bytes
from hf_memopt.hardware.catalog import catalog, catalog_entry
from hf_memopt.hardware.device_names import names_meant

_LARGEST = 256 * 1024  # bytes
_EXAMPLE = '"RTX 4090" = 0.40'


@dataclass(frozen=True)
class Prices:
    """The price of an hour of each card.

    Attributes:
        per_hour: name in the catalog -> price.
        currency: written before amounts.
        origin: the file's name.
    """

    per_hour: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    currency: str = ""
    origin: str = ""


def read_prices(path: str) -> Prices:
    """The price table of a file: a line for each card, `"RTX 4090" = 0.40`, and perhaps `currency = "€"`.

    Raises:
        InputError: an unreadable file, an unknown or ambiguous card, a card priced twice, or an invalid price.
    """
    written = read_bytes(path, _LARGEST).decode("utf-8", "replace")
    try:
        table = tomllib.loads(written)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: not TOML ({one_line(error)}); write a line for each card, as in {_EXAMPLE}"
        ) from error
    currency = table.pop("currency", "")
    if not isinstance(currency, str) or len(currency) > 4:
        raise InputError(f'{path}: currency={brief(currency)} must be at most four characters, as in "€" or "USD"')
    per_hour: dict[str, float] = {}
    for name, price in table.items():
        card = _card(path, name)
        if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < math.inf:
            raise InputError(f"{path}: {name}={brief(price)} must be the price of one card for an hour: {_EXAMPLE}")
        if card in per_hour:
            raise InputError(f"{path}: {name} is {card}, which has a price already: leave one out")
        per_hour[card] = float(price)
    if not per_hour:
        raise InputError(f"{path}: no card has a price; write a line for each, as in {_EXAMPLE}")
    return Prices(MappingProxyType(per_hour), currency, path)


def _card(path: str, name: str) -> str:
    """The catalog's name. A price of one card is not another's: a name must not stand for several."""
    if name not in catalog() and len(cards := names_meant(name, catalog())) > 1:
        raise InputError(f"{path}: {name} could be {', '.join(cards)}: say which")
    try:
        return catalog_entry(name).name
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
