"""What a row's columns mean: the forms that are trained on, and the columns that would change it and are refused.

Any other column (id, source, score, …) cannot change what is trained: it is announced once, and not used.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from hf_memopt.errors import InputError

SYSTEM = ("system", "system_prompt")
MEDIA = ("video", "videos", "image", "images")


@dataclass(frozen=True)
class Form:
    """A way to write a row.

    Attributes:
        needed: columns that every row has.
        optional: columns that are used where a row has them.
    """

    needed: tuple[str, ...]
    optional: tuple[str, ...] = (*SYSTEM, "tools")


# Best first: a row that fits several is read as the first of them.
FORMS = {
    "messages": Form(("messages",)),
    "conversations": Form(("conversations",)),
    "prompt/completion": Form(("prompt", "completion")),
    "alpaca": Form(("instruction", "output"), ("input", "history", *SYSTEM, "tools")),
    "text": Form(("text",), ()),
}

_NEEDS_VIDEO_RECIPE = "recipes/video_sft.py trains on videos and images, in the columns `videos` and `images`"
_NO_AUDIO = "no recipe trains on sound"
_NOT_ANSWERS = "this recipe trains on answers alone, and preferences are no answers"
_WEIGHTS = "every token of an answer counts the same"
_OTHER_FORM = "it belongs to rows with `instruction` and `output`"
_TEMPLATE = "it is not passed to the chat template"
_TOKENIZED = "rows are tokenized here"
_FRAMES = "frames are evenly spaced over the whole clip"
# What parts of a clip, and keys beside it (qwen-vl-utils), are set by for all rows at once.
SAMPLING = {
    **dict.fromkeys(("fps", "video_fps", "sample_fps"), f"{_FRAMES}: use --video_fps"),
    **dict.fromkeys(("nframes", "num_frames", "max_frames", "min_frames"), f"{_FRAMES}: use --max_frames"),
    **dict.fromkeys(
        ("max_pixels", "min_pixels", "resized_height", "resized_width"),
        "frames have one limit for all rows: use --max_pixels_per_frame",
    ),
    **dict.fromkeys(("total_pixels", "max_tokens"), "clips have one limit for all rows: use --max_video_tokens"),
    **dict.fromkeys(
        ("video_start", "video_end", "start", "end", "start_time", "end_time", "clip_start", "clip_end"),
        f"{_FRAMES}: cut the clip out of its file",
    ),
}
# Columns that mean something to other trainers -> why they are not used here.
_REFUSED = {
    **dict.fromkeys(
        (
            *MEDIA,
            "video_path",
            "video_paths",
            "video_url",
            "video_urls",
            "video_file",
            "image_path",
            "image_paths",
            "image_url",
            "image_urls",
            "image_file",
        ),
        _NEEDS_VIDEO_RECIPE,
    ),
    **dict.fromkeys(("audio", "audios", "audio_path", "audio_url", "speech"), _NO_AUDIO),
    **dict.fromkeys(
        ("chosen", "rejected", "rejected_response", "rejected_messages", "rejected_images", "label", "kto_tag"),
        _NOT_ANSWERS,
    ),
    **dict.fromkeys(
        (
            "weight",
            "weights",
            "sample_weight",
            "loss_weight",
            "loss_scale",
            "mask",
            "loss_mask",
            "completion_mask",
            "assistant_masks",
        ),
        _WEIGHTS,
    ),
    **dict.fromkeys(("input", "history"), _OTHER_FORM),
    **dict.fromkeys(("chat_template", "chat_template_kwargs", "documents", "functions"), _TEMPLATE),
    **dict.fromkeys(("input_ids", "labels", "attention_mask", "segments"), _TOKENIZED),
    **dict.fromkeys((*SYSTEM, "tools"), "a text has no messages: use `messages`, or put it into the text"),
    "objects": "boxes and references are not put into the text",
}
_HARMLESS_FOR_TEXT = ("label", "labels", "documents", "input", "history")  # of a classification set, for one


def find_form(names: Iterable[str]) -> str | None:
    """The first form whose columns are all there."""
    names = set(names)
    return next((name for name, form in FORMS.items() if names.issuperset(form.needed)), None)


@functools.cache
def find_refused(names: tuple[str, ...], form: str, with_media: bool = False) -> dict[str, str]:
    """Those of the columns that a row must leave empty, and why.

    Args:
        with_media: the recipe trains on videos and images.
    """
    refused = {**_REFUSED, **(SAMPLING if with_media else {})}
    used = {*FORMS[form].needed, *FORMS[form].optional, *(MEDIA if with_media else ())}
    if form == "text":
        used |= {*_HARMLESS_FOR_TEXT}
    for other in FORMS.values():  # a data set that says the same in two forms
        if set(other.needed) <= set(names):
            used |= {*other.needed, *other.optional} - {*SYSTEM, "tools"}
    return {name: refused[name] for name in names if name in refused and name not in used}


def find_unused(names: Iterable[str], form: str, with_media: bool = False) -> list[str]:
    """Columns that are neither used nor refused."""
    used = {*FORMS[form].needed, *FORMS[form].optional, *(MEDIA if with_media else ())}
    return sorted(set(names) - used - find_refused(tuple(names), form, with_media).keys())


def is_empty(value) -> bool:
    """Whether a value says nothing; Arrow fills what a row lacks with None."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def check_columns(row: dict, form: str, where: str, with_media: bool = False) -> None:
    """Raise where a row fills a column of find_refused().

    Raises:
        InputError: names row and column.
    """
    for name, reason in find_refused(tuple(row), form, with_media).items():
        if not is_empty(row[name]):
            raise InputError(
                f"{where}: the column {name!r} would not be trained on, since {reason}. Leave it out of the data, or "
                f"train without it by --ignore_columns {name}"
            )


def row_number(indices, index: int) -> int:
    """A row's number in its file.

    Args:
        indices: of a Dataset (`_indices`): where its rows stand in the file, if some of them were picked or shuffled.
    """
    return index if indices is None else indices.column(0)[index].as_py()
