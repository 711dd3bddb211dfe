"""Rows of a local file with their line numbers, to say what is wrong with a file that `datasets` cannot read.

`datasets` reports "An error occurred while generating the dataset", with neither line nor reason. Its readers are fast
and stay in use; these run when it fails, or when an error names a row.
"""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief, one_line

Row = dict[str, Any]
_EXAMPLE = 'write one object per line, such as {"messages": […]} or {"text": "…"}'
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


def numbered_rows(path: Path) -> Iterator[tuple[int | None, Row]]:
    """A file's rows with their line numbers from 1; None in parquet files and JSON lists.

    Raises:
        InputError: with the line, its content, and what is accepted.
    """
    try:
        yield from _READERS[path.suffix](path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or one_line(error)}") from error


def explain(path: Path, error: BaseException) -> InputError:
    """The error for a file that `datasets` cannot read.

    Args:
        error: raised by `datasets`.
    """
    count = 0
    try:
        for _ in numbered_rows(path):
            count += 1
    except InputError as explained:
        return explained
    if count == 0:
        return InputError(f"data set {str(path)!r} is empty: the file has no rows")
    return InputError(f"{path}: cannot be read as {path.suffix.removeprefix('.')}: {_root_cause(error)}")


def line_of(path: Path, is_wanted: Callable[[int, Row], bool]) -> int | None:
    """The line of the first row for which is_wanted(row number, row) is true; None where there is none."""
    try:
        for number, (line, row) in enumerate(numbered_rows(path)):
            if is_wanted(number, row):
                return line
    except InputError:  # a line that `datasets` accepts and this reader does not: later numbers are uncertain
        pass
    return None


def _root_cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return one_line(error)[:300]


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
    for number, line in _lines(path):
        if not line.strip():
            continue
        if number == 1 and line.startswith("["):
            yield from _json_list(path)
            return
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
        found = (text.split("\n")[error.lineno - 1].strip()[:60] if text.strip() else "") or "nothing"
        reason = f"{error.msg.removesuffix(' at')}, column {error.colno}"
        raise InputError(f"{path}: line {line} is not JSON ({reason}): found {brief(found)}; {_EXAMPLE}") from error
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
            f"{path}: not a complete parquet file ({one_line(error)[:200]}): copy or write it again"
        ) from error


_READERS = {
    ".jsonl": _json_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".txt": _text_rows,
    ".parquet": _parquet_rows,
}
