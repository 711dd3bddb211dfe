"""Rows of a local file with their lines: what `datasets` reads, read again to say what is wrong with it.

`datasets` reports a broken file as "An error occurred while generating the dataset", with neither line nor reason. Its
own readers stay in use, since they are fast; this one runs when they fail, or when a row has to be named.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief, one_line

Row = dict[str, Any]
_EXAMPLE = 'write one object a line, such as {"messages": […]} or {"text": "…"}'
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def numbered_rows(path: Path) -> Iterator[tuple[int | None, Row]]:
    """A file's rows with their lines, counted from 1; None in parquet and in a JSON list.

    Raises:
        InputError: names the line that is at fault, what it holds, and what is accepted.
    """
    try:
        yield from _READERS[path.suffix](path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error


def explain(path: Path, error: BaseException) -> InputError:
    """Why a file cannot be read.

    Args:
        error: what `datasets` raised.
    """
    count = 0
    try:
        for _ in numbered_rows(path):
            count += 1
    except InputError as found:
        return found
    if count == 0:
        return InputError(f"data set {str(path)!r} is empty: the file has no rows")
    return InputError(f"{path}: cannot be read as {path.suffix.removeprefix('.')}: {_root_cause(error)}")


def line_of(path: Path, is_wanted: Callable[[int, Row], bool]) -> int | None:
    """The line of the first row that a function of its number and itself says yes to; None where there is none."""
    try:
        for number, (line, row) in enumerate(numbered_rows(path)):
            if is_wanted(number, row):
                return line
    except InputError:  # beyond a line that `datasets` reads and this reader does not, lines are not certain
        pass
    return None


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)[:300]


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines as text.

    Raises:
        InputError: one is not UTF-8.
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
    for number, line in _lines(path):
        if not line.strip():
            continue
        if number == 1 and line.startswith("["):
            yield from _json_list(path)
            return
        row = _parsed(path, number, line)
        if not isinstance(row, dict | None):
            raise InputError(f"{path}: line {number} holds {brief(row)}, which is no row: {_EXAMPLE}")
        yield number, row or {}


def _json_list(path: Path) -> Iterator[tuple[None, Row]]:
    """The rows of a file that is one list, whose items' lines are not known; an item alone is a text."""
    text = "".join(line for _, line in _lines(path))
    for row in _parsed(path, 1, text):
        yield None, row if isinstance(row, dict) else {"text": row}


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=lambda _: None)  # NaN, as datasets reads it
    except json.JSONDecodeError as error:
        line = number + error.lineno - 1
        found = (text.split("\n")[error.lineno - 1].strip()[:60] if text.strip() else "") or "nothing"
        reason = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        raise InputError(f"{path}: line {line} is not JSON ({reason}): found {brief(found)}; {_EXAMPLE}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: line {number} is not JSON ({one_line(error)}): {_EXAMPLE}") from error
    if "\\ud" in text.lower() and not _encodes(value):
        raise InputError(
            f"{path}: line {number} has half a surrogate pair (\\ud…), which is no character: take it out"
        )
    return value


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
        return True
    except UnicodeEncodeError:
        return False


def _csv_rows(path: Path) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # a cell holds a whole text; the default is 128 KiB
    reader = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] = []
    try:
        for cells in reader:
            if not cells:
                continue
            if not header:
                header = cells
            elif len(cells) > len(header):
                raise InputError(
                    f"{path}: line {reader.line_num} has {len(cells)} cells, and the first line names {len(header)} "
                    "columns: put quotes around a cell that holds a comma"
                )
            else:
                yield reader.line_num, {**dict.fromkeys(header, ""), **dict(zip(header, cells, strict=False))}
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num} is not CSV ({error}): close every quote") from error


def _text_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Paragraphs, by the lines that they begin on."""
    first, held = 0, []
    for number, line in _lines(path):
        if line.strip("\r\n"):
            first, held = first or number, [*held, line]
        elif held:
            yield first, {"text": "".join(held).strip("\r\n")}
            first, held = 0, []
    if held:
        yield first, {"text": "".join(held).strip("\r\n")}


def _parquet_rows(path: Path) -> Iterator[tuple[None, Row]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    yield None, row
    except (pyarrow.ArrowException, ValueError) as error:
        raise InputError(
            f"{path}: not a whole parquet file ({one_line(error)[:200]}): copy or write it again"
        ) from error


_READERS = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".txt": _text_rows,
    ".parquet": _parquet_rows,
}
