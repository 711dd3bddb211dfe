"""JSON columns with values of several types, read exactly as written in the file.

An Arrow column has one type. Where a file's values have several (content that is a text here and a list of parts
there), datasets 5.2 keeps them as JSON texts, and takes a text that is JSON itself for an encoded value: the answer
`"true"` comes back as True, `"[1, 2]"` as a list, `'"q"'` without its quotes (datasets.utils.json.json_encode_field,
features.Json.encode_example). Encoding every value here makes decoding the exact inverse. Remove this file when
datasets encodes strings too.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_memopt.data.row_files import numbered_rows


def find_mixed(features) -> tuple[str, ...]:
    """Columns with values of several types, at any depth."""
    return tuple(name for name, feature in features.items() if _holds_json(feature))


def _holds_json(feature) -> bool:
    from datasets import Json

    if isinstance(feature, dict):
        return any(_holds_json(inner) for inner in feature.values())
    inner = getattr(feature, "feature", None)  # of a list
    return isinstance(feature, Json) or (inner is not None and _holds_json(inner))


def exact_features(features, mixed: tuple[str, ...]):
    """The features, with every mixed column as JSON."""
    from datasets import Features, Json

    return Features({name: Json() if name in mixed else feature for name, feature in features.items()})


def exact_rows(path: Path, names: tuple[str, ...], mixed: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """A file's rows, with mixed columns encoded as JSON."""
    for _, row in numbered_rows(path):
        yield {name: _encoded(row.get(name)) if name in mixed else row.get(name) for name in names}


def read_exactly(path: Path, features):
    """A Dataset of a file with mixed columns."""
    from datasets import Dataset

    mixed, stat = find_mixed(features), path.stat()
    # `datasets` caches a generator's rows by the hash of its arguments: a changed file must change them.
    arguments = {"path": path, "names": tuple(features), "mixed": mixed, "version": (stat.st_size, stat.st_mtime_ns)}
    return Dataset.from_generator(_versioned, features=exact_features(features, mixed), gen_kwargs=arguments)


def _versioned(path: Path, names: tuple[str, ...], mixed: tuple[str, ...], version: tuple) -> Iterator[dict[str, Any]]:
    yield from exact_rows(path, names, mixed)


def _encoded(value: Any) -> str | None:
    return None if value is None else json.dumps(value)
