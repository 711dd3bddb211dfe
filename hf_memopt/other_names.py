"""Words that other tools have, or that people remember, for names of this package: proposed, or understood where they
are other names of the same thing."""

import tomllib
from collections.abc import Collection
from functools import cache
from pathlib import Path


def plain_word(name: str) -> str:
    """A name without case and separators: what is the same in `Max_Seq-Length` and `max_seq_length`. A + is a part of
    a name: LoRA+ and ZeRO++ are others than LoRA and ZeRO."""
    return "".join(letter for letter in str(name).lower() if letter.isalnum() or letter == "+")


def meant_by(kind: str, name: str, known: Collection[str]) -> str | None:
    """The name that is meant by another tool's, or a phrase that says what to write; None if the word is not known.

    Args:
        kind: a section of other_names.toml; the fields of configurations and the recipes' arguments are settings.
        known: the names that are accepted.
    """
    is_setting = kind.endswith(" field") or kind.startswith("argument")
    section = "setting" if is_setting else kind.removeprefix("preset or ")
    meanings = {**_table().get(kind, {}), **_table().get(section, {})}.get(plain_word(name), ())
    fitting = (meaning for meaning in meanings if meaning in known or meaning.split()[0] in known)
    return next(fitting, meanings[-1] if meanings else None)


def understood(kind: str, name: str) -> str | None:
    """The name of which a word is another one; None if it is none."""
    return _table()["understood"].get(kind, {}).get(plain_word(name))


@cache
def _table() -> dict[str, dict]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
