"""Rows from the embedded corpus, local files or a hub dataset, split into training and held-out rows."""

import itertools
import logging
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from hf_memopt.data.columns import accepted, find_form, find_unused
from hf_memopt.data.pairs import check_pair_columns
from hf_memopt.data.row_files import READERS, captioned_rows, encoded_rows, find_columns
from hf_memopt.errors import InputError, as_input_error, choose, one_line

logger = logging.getLogger(__name__)

FORMATS = (*READERS, ".parquet")
_ROWS_OF_STREAM = 1_000  # whose columns are those of a stream
_MAX_HELD_OUT_OF_STREAM = 200  # rows, where held_out is a fraction: the length is unknown
# The words of a split in the names of a folder's files, as `datasets` knows them -> its own name.
_SPLITS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "dev", "val"},
    "test": {"test", "testing", "eval", "evaluation"},
}
USUAL_HELD_OUT = 0.05
_LARGEST_DEFAULT_SHARE = 0.25  # of the rows, which a recipe's default number may hold out


def load_rows(
    source: str,
    *,
    config: str | None = None,
    split: str = "train",
    held_out_split: str | None = None,
    held_out: float = USUAL_HELD_OUT,
    adapt_held_out: bool = False,
    streaming: bool = False,
    buffer: int = 10_000,
    seed: int = 42,
    ignore: Sequence[str] = (),
    with_media: bool = False,
    pairs: bool = False,
    keep: Callable[[list, str], list] | None = None,
):
    """Training rows, held-out rows and the form of their columns (a name in columns.FORMS).

    Args:
        source: a hub name, a local file (json, jsonl, csv, parquet, txt), a folder of such files, of save_to_disk or
            of clips with captions (row_files.py); None or an embedded corpus ("builtin:documents",
            "builtin:questions", "builtin:preferences").
        config: the hub dataset's configuration name.
        split: the split to train on.
        held_out_split: the split to evaluate on; without one, `held_out` of the training rows.
        held_out: a fraction below 1, or a number of rows.
        adapt_held_out: `held_out` is a default: where that is too much of the rows, fewer are held out.
        streaming: read while training, through a shuffle buffer of `buffer` rows, for data larger than memory.
        ignore: columns to leave out.
        with_media: the recipe trains on videos and images.
        pairs: the recipe trains on pairs of answers; their form is "pairs".
        keep: (rows to train on and the held-out split's, form) -> those that are kept, before rows are held out.

    Raises:
        InputError: the source does not exist, is empty, or has no supported columns.
    """
    splits = open_splits(source, config, streaming, with_media)
    for name in filter(None, (split, held_out_split)):
        if name not in splits:
            raise InputError(f"data set {source!r} has no split {name!r}; it has {', '.join(map(str, splits))}")
    rows, test = (without_columns(splits.get(name), ignore, source) for name in (split, held_out_split))
    if pairs:
        form, unused = "pairs", check_pair_columns(_column_names(rows, source), source)
    else:
        form = _columns(rows, source, with_media)
        unused = find_unused(_column_names(rows, source), form, with_media)
    if unused:
        say_once("data set %r: columns not used: %s", str(source), ", ".join(unused))
    if keep is not None:
        rows, test = keep([rows, test], form)
    if streaming:
        train, test = _hold_out_streaming(rows, test, held_out, adapt_held_out, buffer, seed, source)
    else:
        train, test = _hold_out(rows, test, held_out, adapt_held_out, seed, source)
    return train, test, form


def local_path(source: str) -> Path:
    """The file or the folder of a source, which need not be there if it may be a hub name.

    Raises:
        InputError: it is no hub name and not there, or a file of no format.
    """
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in FORMATS or str(source).startswith((".", "/", "~"))):
        raise InputError(f"data set {source!r}: no such file or folder (looked in {Path.cwd()})")
    if path.is_file() and path.suffix not in FORMATS:
        raise InputError(f"{path}: unknown suffix {path.suffix!r}; known are {', '.join(sorted(FORMATS))}")
    return path


def _undecoded(rows):
    """Rows whose media are files and bytes: `datasets` would decode columns of its own types, with other libraries."""
    from datasets import Image, List, Video

    for name, kind in (rows.features or {}).items():
        inner = kind.feature if isinstance(kind, List) else kind
        if isinstance(inner, Image | Video):
            plain = type(inner)(decode=False)
            rows = rows.cast_column(name, List(plain) if isinstance(kind, List) else plain)
    return rows


def without_columns(rows, ignore: Sequence[str], source):
    """The rows without the ignored columns.

    Raises:
        InputError: a name that is not a column.
    """
    if rows is None or not ignore:
        return rows
    names = _column_names(rows, source)
    for name in ignore:
        if name not in names:
            raise choose("column of ignore_columns", name, names)
    return rows.remove_columns(list(ignore))


def say_once(message: str, *values) -> None:
    """Log a warning on the first of several processes, which all read the same rows."""
    if os.environ.get("RANK", "0") == "0":
        logger.warning(message, *values)


def open_splits(source: str, config: str | None = None, streaming: bool = False, with_media: bool = False) -> dict:
    """The splits of a source by their names, with media as files and bytes; of a file it is "train".

    Args: as load_rows() takes them.

    Raises:
        InputError: there is no such source, or it cannot be read.
    """
    opened = _open(source, config, streaming, with_media)
    return {
        name: _undecoded(rows.to_iterable_dataset() if streaming and hasattr(rows, "to_iterable_dataset") else rows)
        for name, rows in opened.items()
    }


def _open(source: str, config: str | None, streaming: bool, with_media: bool) -> dict:
    """Splits by their names; what lies on this machine may be no stream yet."""
    from datasets import Dataset, load_dataset, load_from_disk

    if source in ("builtin:documents", "builtin:questions", "builtin:preferences"):
        return {"train": _embedded(source)}
    with as_input_error(f"data set {source!r}", Exception):
        path = local_path(source)
        if path.is_file():
            if path.stat().st_size == 0:
                raise InputError(f"data set {source!r} is empty: the file has no rows")
            if path.suffix == ".parquet":
                with as_input_error(f"{path}: not a complete parquet file", Exception):
                    return load_dataset("parquet", data_files=str(path), streaming=streaming)
            return {"train": _rows_of([path], source, streaming)}
        if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
            loaded = load_from_disk(str(path))
            return loaded if isinstance(loaded, dict) else {"train": loaded}
        if with_media and path.is_dir() and (captioned := captioned_rows(path, source)):
            return {"train": Dataset.from_list(captioned)}
        if path.is_dir() and (files := _files_of_rows(path)):
            return {name: _rows_of(paths, source, streaming) for name, paths in _by_split(files).items()}
        return load_dataset(str(path) if path.is_dir() else source, config, streaming=streaming)


def _files_of_rows(folder: Path) -> list[Path]:
    """The files of a folder that holds nothing but files of rows, beside a README and hidden files; else none."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith((".", "README")))
    return files if all(file.is_file() and file.suffix in READERS for file in files) else []


def _by_split(files: list[Path]) -> dict[str, list[Path]]:
    """Files by the splits that their names have, "train" where they have none."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        words = set(re.split(r"[^a-z]+", file.stem.lower()))
        splits.setdefault(next((name for name, known in _SPLITS.items() if words & known), "train"), []).append(file)
    return splits


def _rows_of(paths: list[Path], source, streaming: bool):
    """The rows of local files.

    Raises:
        InputError: with the line that cannot be read.
    """
    from datasets import Dataset, Features, IterableDataset, Json, Value

    texts = find_columns(paths, _ROWS_OF_STREAM if streaming else None)
    if not texts:
        raise InputError(f"data set {source!r} is empty: the file has no rows")
    features = Features({name: Value("string") if is_text else Json() for name, is_text in texts.items()})
    # `datasets` caches a generator's rows by the hash of its arguments: a changed file must change them. Of a list, a
    # stream would make shards.
    version = tuple((stat.st_size, stat.st_mtime_ns) for stat in (path.stat() for path in paths))
    arguments = {"paths": tuple(path.resolve() for path in paths), "columns": tuple(texts.items()), "version": version}
    kind = IterableDataset if streaming else Dataset
    return kind.from_generator(encoded_rows, features=features, gen_kwargs=arguments)


def _embedded(source: str):
    from datasets import Dataset

    from hf_memopt.data import embedded

    if source == "builtin:documents":
        return Dataset.from_dict({"text": list(embedded.documents())})
    if source == "builtin:preferences":
        names = ("prompt", "chosen", "rejected")
        roles = ("user", "assistant", "assistant")
        rows = [
            {name: [{"role": role, "content": text}] for name, role, text in zip(names, roles, pair, strict=True)}
            for pair in embedded.preferences()
        ]
        return Dataset.from_list(rows)
    questions, answers = zip(*embedded.questions(), strict=True)
    messages = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for question, answer in zip(questions, answers, strict=True)
    ]
    return Dataset.from_dict({"messages": messages})


def _column_names(rows, source) -> list[str]:
    """The columns; of some streams, known from the first row only."""
    if rows.column_names is not None:
        return rows.column_names
    try:
        return list(next(iter(rows)))
    except StopIteration:
        raise InputError(f"data set {source!r} is empty") from None
    except Exception as error:
        raise InputError(f"data set {source!r}: {one_line(error)}") from error


def _columns(rows, source, with_media: bool) -> str:
    """The name of the first form whose columns the rows have."""
    names = _column_names(rows, source)
    if not names:
        raise InputError(f"data set {source!r} is empty: the split has no rows")
    form = find_form(names)
    if form is None or (form == "caption" and not with_media):
        raise InputError(
            f"data set {source!r} has the columns {', '.join(names) or 'none'}; accepted are: {accepted(with_media)}"
        )
    return form


def _hold_out(rows, test, held_out: float, adapt: bool, seed: int, source):
    if len(rows) == 0:
        raise InputError(f"data set {source!r} is empty: the split has no rows")
    if test is not None:
        return rows, test
    count = _count_held_out(held_out, len(rows), adapt, source)
    if count == 0:
        return rows, None
    parts = rows.train_test_split(test_size=count, seed=seed, shuffle=True)
    return parts["train"], parts["test"]


def _hold_out_streaming(rows, test, held_out: float, adapt: bool, buffer: int, seed: int, source):
    """Holds out the first rows of a stream, whose length is unknown, and shuffles the others in a buffer.

    Raises:
        InputError: no row is left to train on; the Trainer would start empty epochs forever.
    """
    count = int(held_out) if held_out >= 1 else (_MAX_HELD_OUT_OF_STREAM if held_out else 0)
    count = 0 if test is not None else count
    # A share, and a default, follow the length of a stream that ends here; then it is known.
    adapts = bool(count) and (adapt or held_out < 1)
    most = max(_ROWS_OF_STREAM, int(count / _LARGEST_DEFAULT_SHARE)) if adapts else count
    seen = sum(1 for _ in itertools.islice(rows, most + 1))
    if seen == 0:
        raise InputError(f"data set {source!r} is empty: the split has no rows")
    if count and seen <= most:
        count = _count_held_out(held_out, seen, adapt, source)
    if count:
        test, rows = rows.take(count), rows.skip(count)
    return rows.shuffle(seed=seed, buffer_size=buffer), test


def _count_held_out(held_out: float, rows: int, adapt: bool, source) -> int:
    """Rows to hold out. One row alone is trained on, and a default holds out no more than a part.

    Raises:
        InputError: the number that the user set leaves no row to train on.
    """
    if held_out and rows == 1 and (adapt or held_out < 1):
        say_once("note: held_out: the data have one row, which is trained on; nothing is held out or evaluated")
        return 0
    count = int(held_out) if held_out >= 1 else round(held_out * rows) or int(held_out > 0)
    if adapt and count > _LARGEST_DEFAULT_SHARE * rows:
        count = max(1, round(USUAL_HELD_OUT * rows))
        say_once("note: held_out: %d of the %d rows instead of %d", count, rows, held_out)
    if count >= rows:
        raise InputError(f"held_out={held_out} leaves none of the {rows} rows of {source!r} to train on: lower it")
    return count
