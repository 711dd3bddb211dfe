"""Text of others on a terminal: what it says, without what a terminal obeys."""

import contextlib
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

_NARROWEST = 60  # columns of a table


def plain(text: str) -> str:
    """The text without control sequences and control characters."""
    return text if text.isprintable() else _OBEYED.sub("", text)


class PlainStream:
    """A text stream that writes plain() texts: what a program prints may hold a path or a name that others chose.

    A carriage return at the beginning stays: it is how a counter overwrites its line.

    Attributes:
        unfiltered: the stream, for rich, whose colours are control sequences; its cells are plain() before.
    """

    def __init__(self, stream) -> None:
        self.unfiltered = stream

    def write(self, text: str) -> int:
        clear_status()
        begin = "\r" if text.startswith("\r") else ""
        return self.unfiltered.write(begin + plain(text))

    def writelines(self, lines) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str):
        return getattr(self.unfiltered, name)


@contextlib.contextmanager
def only_plain_text(stderr: bool = True):
    """Let everything in here print plain() texts alone.

    Args:
        stderr: there, too; progress bars, which move the cursor, write to it.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(PlainStream(sys.stdout)))
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(PlainStream(sys.stderr)))
        yield


def console():
    """A rich Console on stdout, for texts that are plain() already."""
    from rich.console import Console

    clear_status()
    made = Console(file=getattr(sys.stdout, "unfiltered", None))
    if made.width < _NARROWEST:  # a table would have a letter or two a line
        made.width = _NARROWEST
    return made


_status: list[str] = []  # the line that is shown, of stderr's terminal


def show_status(text: str) -> None:
    """Say on stderr what takes time: on a terminal in one line, which the next text takes the place of."""
    if not sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
        return
    clear_status()
    line = textwrap.shorten(plain(text), max(shutil.get_terminal_size().columns - 1, 20), placeholder=" …")
    _write_over(line)
    _status.append(line)


def clear_status() -> None:
    """Take the line away, if there is one."""
    while _status:
        _write_over(" " * len(_status.pop()))


def _write_over(line: str) -> None:
    stream = getattr(sys.stderr, "unfiltered", sys.stderr)
    stream.write(f"{line}\r")
    stream.flush()


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
        return {plain(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_values(item) for item in value]
    return plain(value) if isinstance(value, str) else value
