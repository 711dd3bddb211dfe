"""JSON columns whose values have several types, read as they stand in the file.

An Arrow column has one type. Where a file's values have several (content that is a text here and a list of parts
there), datasets 5.2 keeps them as JSON texts, and takes a text that is JSON itself for an encoded value: the answer
`"true"` comes back as True, `"[1, 2]"` as a list, `'"q"'` without its quotes (datasets.utils.json.json_encode_field,
features.Json.encode_example). Here every value is encoded, so that every one is decoded to itself. It can go when
datasets encodes texts too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_memopt.data.row_files import numbered_rows


def find_mixed(features) -> tuple[str, ...]:
    """The columns that hold such values, at any depth."""
    return tuple(name for name, feature in features.items() if _holds_json(feature))


def _holds_json(feature) -> bool:
    from datasets import Json

    if isinstance(feature, dict):
        return any(_holds_json(inner) for inner in feature.values())
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, Json) or (inner is not None and _holds_json(inner))


def exact_features(features, mixed: tuple[str, ...]):
    """The features with every mixed column encoded as a whole."""
    from datasets import Features, Json

    return Features({name: Json() if name in mixed else feature for name, feature in features.items()})


def exact_rows(path: Path, names: tuple[str, ...], mixed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A file's rows, their mixed columns encoded."""
    for _, row in numbered_rows(path):
        yield {name: _encoded(row.get(name)) if name in mixed else row.get(name) for name in names}


def read_exactly(path: Path, features):
    """A Dataset of a file with mixed columns."""
    from datasets import Dataset

    mixed, about = find_mixed(features), path.stat()
    # `datasets` keeps what a generator made by the hash of its arguments: a file that has changed is another.
    arguments = {"path": path, "names": tuple(features), "mixed": mixed, "version": (about.st_size, about.st_mtime_ns)}
    return Dataset.from_generator(_versioned, features=exact_features(features, mixed), gen_kwargs=arguments)


def _versioned(path: Path, names: tuple[str, ...], mixed: tuple[str, ...], version: tuple) -> Iterator[dict[str, Any]]:
    yield from exact_rows(path, names, mixed)


def _encoded(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
