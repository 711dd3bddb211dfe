"""What a data set trains a model for, of its columns, and how many samples it has."""

from pathlib import Path

from hf_memopt.data.columns import MEDIA, find_form
from hf_memopt.data.pairs import PAIRS
from hf_memopt.data.row_files import READERS, numbered_rows
from hf_memopt.errors import InputError, listed

_EXAMPLES = '{"messages": [...]}, {"text": "..."} or {"prompt": ..., "chosen": ..., "rejected": ...}'


def is_readable(source: str) -> bool:
    """True for a local file of rows; a hub name, a folder and parquet are read when the job runs.

    Raises:
        InputError: a path to nothing.
    """
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in READERS or source.startswith((".", "/", "~"))):
        raise InputError(f"data set {source!r}: no such file or folder (looked in {Path.cwd()})")
    return path.is_file() and path.suffix in READERS


def task_and_samples(source: str) -> tuple[str | None, int]:
    """A file's task (sft or dpo; None for texts and for videos, which a model's own recipe takes) and its rows.

    Raises:
        InputError: a row that cannot be read, or columns that no recipe trains on.
    """
    columns: set[str] = set()
    rows = 0
    for _, row in numbered_rows(Path(source).expanduser()):
        columns.update(row)
        rows += 1
    if not rows:
        raise InputError(f"data set {source!r} is empty: the file has no rows")
    if columns.issuperset(PAIRS.needed):
        return "dpo", rows
    form = find_form(columns)
    if form is None and not columns.intersection(MEDIA):
        raise InputError(
            f"data set {source!r} has the columns {listed(sorted(columns), 8)}; write rows such as {_EXAMPLES}"
        )
    return (None if form in (None, "text") or columns.intersection(MEDIA) else "sft"), rows
