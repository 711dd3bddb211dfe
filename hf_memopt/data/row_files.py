"""Rows of a local text file, exactly as written, and the line of what is wrong in one.

The readers of `datasets` say "An error occurred while generating the dataset", with neither line nor reason. JSON
columns whose values have several types (content that is a text here and a list of parts there) they keep as JSON, and
take a text that is JSON itself for an encoded value (5.2, features.Json.encode_example): the answer `"true"` comes
back as True. So a column of anything but texts is encoded here, of which decoding is the exact inverse.
"""

import contextlib
import csv
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.data.turns import without_nones
from hf_memopt.errors import InputError, brief, listed, one_line

Row = dict[str, Any]
_EXAMPLE = 'write one object per line, such as {"messages": […]} or {"text": "…"}'
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def numbered_rows(path: Path) -> Iterator[tuple[int | None, Row]]:
    """A file's rows with their line numbers from 1; None in JSON lists.

    Raises:
        InputError: with the line, its content, and what is accepted.
    """
    try:
        yield from READERS[path.suffix](path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error


def find_columns(paths: Sequence[Path], first: int | None) -> dict[str, bool]:
    """The columns of files, and whether they hold texts alone.

    Args:
        first: how many rows to read of all; None for all.

    Raises:
        InputError: see numbered_rows().
    """
    columns: dict[str, bool] = {}
    rows = itertools.chain.from_iterable(map(numbered_rows, paths))
    for _, row in itertools.islice(rows, first):
        for name, value in row.items():
            columns[name] = columns.get(name, True) and isinstance(value, str | None)
    return columns


def encoded_rows(paths: tuple[Path, ...], columns: tuple[tuple[str, bool], ...], version: tuple) -> Iterator[Row]:
    """The rows of files as `datasets` stores them: JSON in each column that find_columns() has as no text.

    Raises:
        InputError: a row differs from those that find_columns() read.
    """
    names = {name for name, _ in columns}
    for path, (line, row) in ((file, row) for file in paths for row in numbered_rows(file)):
        where = f"{path}: line {line}" if line else str(path)
        if extra := sorted(row.keys() - names):
            raise InputError(f"{where} has a column {extra[0]!r}, which the first rows have not: name it there, too")
        for name, is_text in columns:
            if is_text and not isinstance(row.get(name), str | None):
                raise InputError(f"{where}: {name} must be a text, as in the first rows, not {brief(row[name])}")
        found = ((name, row.get(name), is_text) for name, is_text in columns)
        yield {name: value if is_text or value is None else json.dumps(value) for name, value, is_text in found}


def find_line(path: Path, is_wanted: Callable[[int, Row], bool]) -> int | None:
    """The line of the first row for which is_wanted(row number, row) is true; None where there is none."""
    found = (line for number, (line, row) in enumerate(numbered_rows(path)) if is_wanted(number, row))
    # A line that `datasets` accepts and this reader does not: later numbers are uncertain.
    with contextlib.suppress(InputError):
        return next(found, None)
    return None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines, decoded.

    Raises:
        InputError: a line is not UTF-8.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                if line.startswith(_UTF16) or b"\0" in line[:64]:
                    raise InputError(f"{path}: line 1 is not UTF-8 but looks like UTF-16 or binary: save it as UTF-8")
                line = line.removeprefix(b"\xef\xbb\xbf")
            try:
                yield number, line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{path}: line {number} is not UTF-8 (byte {line[error.start]:#04x} at column {error.start + 1}): "
                    "save the file as UTF-8"
                ) from error


def _json_rows(path: Path) -> Iterator[tuple[int | None, Row]]:
    first = True
    for number, line in _lines(path):
        if not line.strip():
            continue
        if first and line.lstrip().startswith("["):
            yield from _json_list(path)
            return
        first = False
        row = _parsed(path, number, line.rstrip())  # behind its newline an error would be of the next line
        if not isinstance(row, dict | None):
            raise InputError(f"{path}: line {number} holds {brief(row)}, not an object: {_EXAMPLE}")
        yield number, row or {}


def _json_list(path: Path) -> Iterator[tuple[None, Row]]:
    """The rows of a file that is one JSON list, whose line numbers are unknown; a bare string is a text."""
    lines = [line for _, line in _lines(path)]
    try:
        rows = _parsed(path, 1, "".join(lines).rstrip())
    except InputError:
        # Of rows that stand on a line each, an unfinished one swallows those that follow: look at each alone.
        for number, line in enumerate(lines, 1):
            row = line.strip().removeprefix("[").strip().removesuffix("]").rstrip().removesuffix(",")
            if row and (number == len(lines) or row.startswith("{")) and not _is_json(row):
                _parsed(path, number, row)
        raise
    for row in rows:
        yield None, row if isinstance(row, dict) else {"text": row}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
        return True
    except (ValueError, RecursionError):
        return False


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=lambda _: None)  # NaN, as datasets reads it
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        content = (text.split("\n")[error.lineno - 1].strip()[:60] if text.strip() else "") or "nothing"
        reason = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        raise InputError(f"{path}: line {line} is not JSON ({reason}): found {brief(content)}; {_EXAMPLE}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: line {number} is not JSON ({one_line(error)}): {_EXAMPLE}") from error
    if "\\ud" in text.lower() and not _encodes(value):
        raise InputError(
            f"{path}: line {number} has half a surrogate pair (\\ud…), which is not a character: remove it"
        )
    return value


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return True
    except UnicodeEncodeError:
        return False


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # cells hold whole documents; the default is 128 KiB
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] = []
    first = end = 0  # lines of a row, which quotes may spread over several
    try:
        for cells in reader:
            first, end = end + 1, reader.line_num
            if not cells:
                continue
            if not header:
                header = cells
            elif len(cells) > len(header):
                raise InputError(
                    f"{path}: line {first} has {len(cells)} cells, and the first line names {len(header)} "
                    "columns: put quotes around a cell that holds a comma"
                )
            else:
                yield first, {**dict.fromkeys(header, ""), **dict(zip(header, cells, strict=False))}
    except csv.Error as error:
        raise InputError(f"{path}: line {end + 1} is not CSV ({error}): close every quote") from error


def _text_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Paragraphs, numbered by their first line."""
    first, paragraph = 0, []
    for number, line in _lines(path):
        if line.strip("\r\n"):
            first, paragraph = first or number, [*paragraph, line]
        elif paragraph:
            yield first, {"text": "".join(paragraph).strip("\r\n")}
            first, paragraph = 0, []
    if paragraph:
        yield first, {"text": "".join(paragraph).strip("\r\n")}


READERS = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".txt": _text_rows,
}


@dataclass(frozen=True)
class Place:
    """A row's place. Its line number is looked up in __str__, since only rows with errors are printed.

    Attributes:
        source: dataset name or file.
        number: of the row in its file; in a stream, in reading order, which shuffling changes.
        row: the row itself, in a stream: its line is found by comparing.
        kind: what the message calls a row.
    """

    source: str
    number: int
    row: dict[str, Any] | None = field(default=None, repr=False)
    kind: str = "row"

    def __str__(self) -> str:
        line = self._line()
        order = " in the order that the stream is read" if self.row is not None else ""
        return f"{self.source or 'the data'}: {f'line {line}, ' if line else ''}{self.kind} {self.number}{order}"

    def _line(self) -> int | None:
        path = Path(self.source).expanduser() if self.source else Path()
        if path.suffix not in READERS or not path.is_file():
            return None
        if self.row is None:
            return find_line(path, lambda number, _: number == self.number)
        values = without_nones(self.row)
        return find_line(path, lambda _, row: without_nones(row) == values)


_VIDEOS = (".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp")


def captioned_rows(folder: Path, source: str) -> list[dict[str, str | None]] | None:
    """Rows of `video` or `image` and `caption`; None of a folder without clips and pictures, and of one whose metadata
    `datasets` reads itself.

    Raises:
        InputError: a clip without a caption, or one that is empty.
    """
    media = sorted(path for path in folder.iterdir() if path.suffix.lower() in (*_VIDEOS, *_IMAGES))
    if not media or any((folder / f"metadata.{suffix}").is_file() for suffix in ("csv", "jsonl", "parquet")):
        return None
    texts = {path: path.with_suffix(".txt") for path in media}
    if bare := [path.name for path in media if not texts[path].is_file()]:
        raise InputError(
            f"data set {source!r}: {listed(bare, 3)} of {len(media)} files without a caption: write it into a text "
            f"file of the same name ({Path(bare[0]).stem}.txt), or rows of video and caption into a jsonl file"
        )
    rows = []
    for path, text in texts.items():
        if not (caption := text.read_text(encoding="utf-8").strip()):
            raise InputError(f"data set {source!r}: {text.name} is empty: write the caption of {path.name} into it")
        is_video = path.suffix.lower() in _VIDEOS
        rows.append(
            {
                "video": str(path.resolve()) if is_video else None,
                "image": None if is_video else str(path.resolve()),
                "caption": caption,
            }
        )
    return rows
