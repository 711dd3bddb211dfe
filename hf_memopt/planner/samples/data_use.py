"""What a data set trains a model for, by its rows, each judged as the recipe that would take it judges it."""

import contextlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hf_memopt.data.bad_rows import BadRows, sift
from hf_memopt.data.chat import answer_judge, find_answer_kind, read_answer
from hf_memopt.data.columns import MEDIA, Judge, accepted, find_form
from hf_memopt.data.pairs import PAIRS, check_pair_columns, check_prompt, pair_judge
from hf_memopt.data.sources import local_path, open_splits, without_columns
from hf_memopt.data.tokens import check_text
from hf_memopt.data.turns import joined_text
from hf_memopt.errors import InputError, listed
from hf_memopt.files import check_links
from hf_memopt.hub_names import is_cached
from hf_memopt.video.conversations import conversation
from hf_memopt.video.images import image_size, open_medium

_PAIRS, _ANSWERS = ("dpo", "reward"), ("sft",)
# Trainers whose samples are prompts -> the columns that have to be filled.
_PROMPTS = {"grpo": ("prompt", "completion"), "rloo": ("prompt",), "kto": ("prompt", "completion")}
_CLIP_PARTS = ("video", "image", "video_url", "image_url")
_BYTES_A_TOKEN = 4  # of UTF-8, roughly, in the tokenizers of today's models; only where a model's own is not here


@dataclass(frozen=True)
class Use:
    """What a data set trains a model for.

    Attributes:
        task: of TRL's; None for texts, and for clips, which a model's own recipe takes.
        samples: good rows; None of texts, which are cut into blocks.
        media: they have videos or images.
        bad: rows that cannot be trained on.
        lengths: tokens of each good row that one sample is made of; of a pair, of its longer answer.
        counted: by the model's tokenizer, not by the rows' bytes.
        pictures: of rows without videos, as `--set` takes a sample with the most and the largest of them; empty where
            the job's own clips are planned.
    """

    task: str | None
    samples: int | None
    media: bool
    bad: BadRows = field(default_factory=BadRows, compare=False)
    lengths: tuple[int, ...] = field(default=(), compare=False)
    counted: bool = field(default=False, compare=False)
    pictures: dict[str, Any] = field(default_factory=dict, compare=False)

    def check_model(self, source: str, spec) -> None:
        """Refuse clips for a model of texts.

        Args:
            spec: JobSpec with the model's configuration.

        Raises:
            InputError: the model takes no videos.
        """
        if self.media and spec.video is None and not self.pictures:
            if takes_media(spec.config):
                raise InputError(
                    f"data set {source!r} has videos: --set max_frames=N plans for so many frames of each"
                )
            raise InputError(f"data set {source!r} has videos or images, and {spec.model_name} takes none")

    def longer_than(self, tokens: int | None) -> int:
        """How many samples are cut to that many tokens."""
        return sum(length > tokens for length in self.lengths) if tokens else 0

    def notes(self, tokens: int | None) -> list[str]:
        """What a plan of samples of so many tokens leaves out of the data.

        Args:
            tokens: of a sample, at most; None of clips.
        """
        notes = []
        if self.pictures:
            notes.append(
                f"for rows of {self.pictures['images']} × {self.pictures['image_size']} and "
                f"{self.pictures['answer_tokens']:,} tokens of text, the most that the {self.samples:,} rows have"
            )
        if self.bad.count:
            notes.append(str(self.bad))
        if longer := self.longer_than(tokens):
            by = "" if self.counted else f" by {_BYTES_A_TOKEN} bytes a token"
            notes.append(
                f"{longer:,} of {len(self.lengths):,} rows are longer than {tokens:,} tokens{by}, the longest has "
                f"{max(self.lengths):,}: what lies beyond is cut; --seq-len plans longer ones"
            )
        return notes

    def to_dict(self, tokens: int | None) -> dict[str, Any]:
        return {
            "rows": self.bad.total,
            "bad_rows": self.bad.counts,
            "longer": self.longer_than(tokens),
            "longest": max(self.lengths, default=None),
            "tokens_are": "counted" if self.counted else "estimated",
        }


def find_use(
    source: str,
    task: str | None = None,
    with_media: bool = False,
    model: str | None = None,
    skip: bool = False,
    ignore: Sequence[str] = (),
    clips: bool | None = None,
) -> Use | None:
    """The use of local data; None of a hub name, which is read when the job runs.

    Args:
        task: that the user named.
        with_media: the model takes videos or images.
        model: whose tokenizer counts tokens and whose chat template has to write all of a row, where it is on this
            machine.
        skip: leave out rows that cannot be trained on.
        ignore: columns to leave out.
        clips: the job has videos or images, whatever the rows have; by default where the model takes them.

    Raises:
        InputError: nothing is there, a row cannot be read, or the recipe of the task does not train on such rows.
    """
    path = local_path(source)
    if not path.exists():
        return None
    if path.is_dir() and not any(path.iterdir()):
        raise InputError(f"data set {source!r} is an empty folder")
    splits = open_splits(source, with_media=with_media)
    if "train" not in splits:
        raise InputError(f"data set {source!r} has no split 'train'; it has {', '.join(map(str, splits))}")
    rows = without_columns(splits["train"], ignore, source)
    if not len(rows):
        raise InputError(f"data set {source!r} is empty: the split has no rows")
    return _of_rows(rows, source, task, with_media, _tokenizer(model), skip, with_media if clips is None else clips)


def takes_media(config) -> bool:
    """True of models of pictures, or of videos, and texts."""
    return getattr(config, "vision_config", None) is not None


def _of_rows(rows, source: str, task: str | None, with_media: bool, tokenizer, skip: bool, clips: bool) -> Use:
    columns = rows.column_names

    def unsuitable(wanted: str) -> InputError:
        return InputError(f"data set {source!r} has the columns {listed(sorted(columns), 8) or 'none'}; {wanted}")

    if task in _PROMPTS:
        if missing := [name for name in _PROMPTS[task] if name not in columns]:
            raise unsuitable(f"task={task} needs {' and '.join(missing)}")
        judge = partial(check_prompt, needed=_PROMPTS[task])
        return _judged(rows, source, judge, Use(task, len(rows), _has_media(rows, with_media)), skip)
    if task in _PAIRS or (task is None and _are_pairs(rows)):
        if missing := [name for name in PAIRS.needed if name not in columns]:
            raise unsuitable(f"task={task} needs {' and '.join(missing)}")
        check_pair_columns(columns, source)
        judge = pair_judge(tokenizer)
        use = Use(task or "dpo", len(rows), _has_media(rows, with_media))
        return _judged(rows, source, judge, use, skip, tokenizer, _pair_texts)
    form, media = find_form(columns), _has_media(rows, with_media)
    if form is None or (form == "caption" and not media):
        raise unsuitable(f"accepted are: {accepted(with_media)}; chosen + rejected")
    if form == "text" and task not in _ANSWERS:
        return _judged(rows, source, check_text, Use(task, None, media), skip)
    if media or clips:
        (good,), bad = sift([rows], conversation, source, skip, "--skip-bad-rows")
        pictures = _pictures(good, source, tokenizer) if with_media and not clips else {}
        return Use(task, len(good), media, bad, pictures=pictures)
    kind = find_answer_kind(rows, form)
    judge, texts_of = answer_judge(form, kind, tokenizer), partial(_answer_texts, form=form, kind=kind)
    return _judged(rows, source, judge, Use(task or "sft", len(rows), media), skip, tokenizer, texts_of)


def _judged(rows, source: str, judge: Judge, use: Use, skip: bool, tokenizer=None, texts_of=None) -> Use:
    """The use of the rows that a judge accepts.

    Args:
        texts_of: the texts of a row, as messages or one text, of which the longest has to fit a sample.

    Raises:
        InputError: rows that it refuses, unless they are skipped.
    """
    (good,), bad = sift([rows], judge, source, skip, "--skip-bad-rows")
    lengths = [max(_tokens(text, tokenizer) for text in texts_of(row)) for row in good] if texts_of else []
    samples = None if use.samples is None else len(good)
    return replace(use, samples=samples, bad=bad, lengths=tuple(lengths), counted=tokenizer is not None)


def _pictures(rows, source: str, tokenizer) -> dict[str, Any]:
    """Use.pictures, from the headers of the files; empty where a row has a video.

    Raises:
        BadVideo: a picture is not there, or is none.
    """
    path = local_path(source)
    folder = path if path.is_dir() else path.parent
    most, tokens, largest = 0, 1, (0, 0)
    for row in rows:
        messages, media = conversation(row, "")
        if any(medium.kind == "video" for medium in media):
            return {}
        texts = (part["text"] for message in messages for part in message["content"] if part["type"] == "text")
        most, tokens = max(most, len(media)), max(tokens, sum(_tokens(text, tokenizer) for text in texts))
        opened = (open_medium(medium.source, lambda name: folder / Path(name).expanduser()) for medium in media)
        largest = max(largest, *map(image_size, opened), key=math.prod)
    size = {"images": most, "image_size": f"{largest[1]}x{largest[0]}", "answer_tokens": tokens}
    return size if most else {}


def _answer_texts(row: dict, form: str, kind: str) -> list:
    """A row's sample: a text, or messages."""
    found = read_answer(row, "", form, kind)
    parts = [found[name] for name in ("text", "messages", "prompt", "completion") if name in found]
    return [parts[0] if len(parts) == 1 else parts[0] + parts[1]]


def _pair_texts(row: dict) -> list:
    """Both answers of a pair, each behind the prompt."""
    prompt = row.get("prompt") or type(row["chosen"])()
    return [prompt + row[name] for name in PAIRS.needed]


def _tokens(text: str | list, tokenizer) -> int:
    """Tokens of a text or of messages; without a tokenizer, by their bytes."""
    if tokenizer is None:
        written = text if isinstance(text, str) else "".join(joined_text(turn["content"], "") for turn in text)
        return -(-len(written.encode()) // _BYTES_A_TOKEN)
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, tokenize=False) if tokenizer.chat_template else json.dumps(text)
    return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _tokenizer(model: str | None):
    """A model's tokenizer where it is on this machine; None where it is not."""
    if model is None or not (Path(model).is_dir() or is_cached(model)):
        return None
    from transformers import AutoTokenizer

    if Path(model).is_dir():
        check_links(Path(model))
    with contextlib.suppress(Exception):  # a folder of a configuration alone, or a tokenizer of the model's own code
        return AutoTokenizer.from_pretrained(model, local_files_only=True, trust_remote_code=False)
    return None


def _are_pairs(rows) -> bool:
    """True of rows of pairs alone, and where most rows of another form are pairs, too."""
    if not set(rows.column_names).issuperset(PAIRS.needed):
        return False
    return find_form(rows.column_names) is None or _most(rows, lambda row: all(row[name] for name in PAIRS.needed))


def _most(rows, is_so: Callable[[dict], bool]) -> bool:
    return 2 * sum(map(is_so, rows)) > len(rows)


def _has_media(rows, with_media: bool) -> bool:
    """True if rows have videos or images: any, for a model that takes them; most, for one that does not, whose recipe
    refuses single ones."""

    def has(row: dict) -> bool:
        return any(row.get(name) for name in MEDIA) or _has_clip_parts(row)

    return any(map(has, rows)) if with_media else _most(rows, has)


def _has_clip_parts(row: dict) -> bool:
    """True if a message has a video or an image as a part of its content."""
    turns = next((row[name] for name in ("messages", "conversations") if isinstance(row.get(name), list)), [])
    contents = (turn.get("content") for turn in turns if isinstance(turn, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") in _CLIP_PARTS for part in parts)
