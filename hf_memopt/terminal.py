"""Text of others on a terminal: what it says, without what a terminal obeys."""

import re
import shutil
import sys
import textwrap

# Colours and cursor movements (ECMA-48), other control characters but tab and newline, and Unicode's overrides of the
# reading direction, by which a line can show something else than it holds; and halves of characters, which JSON can
# hold and UTF-8 cannot.
_OBEYED = re.compile(
    r"\x1b\[[0-?]{0,30}[ -/]{0,5}[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def plain(text: str) -> str:
    """The text without control sequences and control characters."""
    return text if text.isprintable() else _OBEYED.sub("", text)


def say(text: str, stream=None) -> None:
    """Print sentences: on a terminal in lines that break between words, elsewhere as they are.

    Args:
        stream: where to; stdout by default.
    """
    stream = sys.stdout if stream is None else stream
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
    print(text, file=stream, flush=True)


def plain_values(value):
    """A copy of what JSON can hold, with plain() texts and keys."""
    if isinstance(value, dict):
        return {plain(key): plain_values(one) for key, one in value.items()}
    if isinstance(value, list):
        return [plain_values(one) for one in value]
    return plain(value) if isinstance(value, str) else value
