"""What a data set trains a model for, of its columns, and how many samples it has."""

from dataclasses import dataclass
from pathlib import Path

from hf_memopt.data.columns import MEDIA, find_form
from hf_memopt.data.pairs import PAIRS
from hf_memopt.data.row_files import READERS, numbered_rows
from hf_memopt.errors import InputError, listed

_EXAMPLES = '{"messages": [...]}, {"text": "..."} or {"prompt": ..., "chosen": ..., "rejected": ...}'


@dataclass(frozen=True)
class Use:
    """What a data set trains a model for.

    Attributes:
        task: sft or dpo; None for texts, and for clips, which a model's own recipe takes.
        samples: rows.
        media: they have videos or images.
    """

    task: str | None
    samples: int
    media: bool

    def check_model(self, spec) -> None:
        """Refuse clips for a model of texts.

        Args:
            spec: JobSpec with the model's configuration.

        Raises:
            InputError: the model takes no videos.
        """
        if self.media and spec.video is None:
            raise InputError(f"data set {spec.dataset!r} has videos or images, and {spec.model_name} takes none")


def is_readable(source: str) -> bool:
    """True for a local file of rows; a hub name, a folder and parquet are read when the job runs.

    Raises:
        InputError: a path to nothing.
    """
    path = Path(source).expanduser()
    if not path.exists() and (path.suffix in READERS or source.startswith((".", "/", "~"))):
        raise InputError(f"data set {source!r}: no such file or folder (looked in {Path.cwd()})")
    return path.is_file() and path.suffix in READERS


def find_use(source: str) -> Use:
    """What a local file's rows are for.

    Raises:
        InputError: a row that cannot be read, or columns that no recipe trains on.
    """
    columns: set[str] = set()
    samples = 0
    for _, row in numbered_rows(Path(source).expanduser()):
        columns.update(row)
        samples += 1
    if not samples:
        raise InputError(f"data set {source!r} is empty: the file has no rows")
    form, media = find_form(columns), bool(columns.intersection(MEDIA))
    if columns.issuperset(PAIRS.needed):
        return Use("dpo", samples, media)
    if form is None or (form == "caption" and not media):
        raise InputError(
            f"data set {source!r} has the columns {listed(sorted(columns), 8)}; write rows such as {_EXAMPLES}"
        )
    return Use(None if form == "text" or media else "sft", samples, media)
