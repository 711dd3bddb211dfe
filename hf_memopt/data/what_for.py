"""What a data set trains a model for, by its rows, as the recipe that would take it reads them."""

from dataclasses import dataclass
from pathlib import Path

from hf_memopt.data.clip_folder import captioned_rows
from hf_memopt.data.columns import MEDIA, accepted, check_columns, find_form
from hf_memopt.data.pairs import PAIRS
from hf_memopt.data.row_files import READERS, numbered_rows
from hf_memopt.data.sources import local_path
from hf_memopt.errors import InputError, listed

_PAIRS, _ANSWERS = ("dpo", "reward"), ("sft",)
_PROMPTS = ("grpo", "rloo", "kto")  # whose trainers have columns of their own beside it
_CLIP_PARTS = ("video", "image", "video_url", "image_url")


@dataclass(frozen=True)
class Use:
    """What a data set trains a model for.

    Attributes:
        task: of TRL's; None for texts, and for clips, which a model's own recipe takes.
        samples: rows; None of texts, which are cut into blocks.
        media: they have videos or images.
    """

    task: str | None
    samples: int | None
    media: bool

    def check_model(self, source: str, spec) -> None:
        """Refuse clips for a model of texts.

        Args:
            spec: JobSpec with the model's configuration.

        Raises:
            InputError: the model takes no videos.
        """
        if self.media and spec.video is None:
            raise InputError(f"data set {source!r} has videos or images, and {spec.model_name} takes none")


def find_use(source: str, task: str | None = None, with_media: bool = False) -> Use | None:
    """The use of a local file of rows or folder of clips; None of what is read when the job runs: a hub name, parquet,
    any other folder.

    Args:
        task: that the user named.
        with_media: the model takes videos.

    Raises:
        InputError: nothing is there, a row cannot be read, or the recipe of the task does not train on such rows.
    """
    path = local_path(source)
    if path.is_dir():
        if not any(path.iterdir()):
            raise InputError(f"data set {source!r} is an empty folder")
        captioned = captioned_rows(path, source) if with_media else None
        return captioned and Use(task, len(captioned), media=True)
    readable = path.is_file() and path.suffix in READERS
    return _of_rows(path, source, task, with_media) if readable else None


def _of_rows(path: Path, source: str, task: str | None, with_media: bool) -> Use:
    rows = [row for _, row in numbered_rows(path)]
    if not rows:
        raise InputError(f"data set {source!r} is empty: the file has no rows")
    shared = set(rows[0]).intersection(*rows)
    media = any(set(row) & {*MEDIA} or _has_clip_parts(row) for row in rows)
    pairs, form = shared.issuperset(PAIRS.needed), find_form(shared)
    if task in _PROMPTS:
        if "prompt" not in shared:
            raise _unsuitable(source, rows, f"task={task} needs prompt")
        return Use(task, len(rows), media)
    if task in _PAIRS or (task is None and pairs):
        if not pairs:
            raise _unsuitable(source, rows, f"task={task} needs chosen and rejected")
        return Use(task or "dpo", len(rows), media)
    if form is None or (form == "caption" and not media):
        raise _unsuitable(source, rows, f"accepted are: {accepted(with_media)}; chosen + rejected")
    for number, row in enumerate(rows):
        check_columns(row, form, f"data set {source!r}, row {number}", with_media or media)
    if form == "text" and task not in _ANSWERS:
        return Use(task, None, media)
    return Use(task or (None if media or with_media else "sft"), len(rows), media)


def _has_clip_parts(row: dict) -> bool:
    """True if a message has a video or an image as a part of its content."""
    turns = next((row[name] for name in ("messages", "conversations") if isinstance(row.get(name), list)), [])
    contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") in _CLIP_PARTS for part in parts)


def _unsuitable(source: str, rows: list[dict], wanted: str) -> InputError:
    columns = listed(sorted(set().union(*rows)), 8) or "none"
    everywhere = "" if all(set(row) == set(rows[0]) for row in rows) else ", not all in every row"
    return InputError(f"data set {source!r} has the columns {columns}{everywhere}; {wanted}")
