"""The meaning of a row's columns: supported forms, and columns refused since ignoring them would change training.

Any other column (id, source, score, …) is ignored, with one warning.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hf_memopt.errors import InputError

Judge = Callable[[dict[str, Any], Any], Any]  # takes a row and the name of its place; raises InputError for a bad one
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


# In order of preference, for rows that match several forms.
FORMS = {
    "messages": Form(("messages",)),
    "conversations": Form(("conversations",)),
    "prompt/completion": Form(("prompt", "completion")),
    "alpaca": Form(("instruction", "output"), ("input", *SYSTEM, "tools")),
    "text": Form(("text",), ()),
    "caption": Form(("caption",)),  # of a video or an image, which is the question
}

# What a row may say of its clips, as qwen-vl-utils spells it: video/frame_limits.py.
CLIP_SAMPLING = (
    *("fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    *("video_start", "video_end", "sample_fps"),
)
# Other keys of a clip that tools have -> what to write instead.
SAMPLING = {
    "video_fps": "write `fps`, or use --video_fps for all rows",
    "num_frames": "write `nframes`, or use --max_frames for all rows",
    "max_tokens": "write `total_pixels`, or use --max_video_tokens for all rows",
    **dict.fromkeys(("resized_height", "resized_width"), "write `min_pixels` and `max_pixels`"),
    **dict.fromkeys(
        ["start", "end", "start_time", "end_time", "clip_start", "clip_end"],
        "write `video_start` and `video_end`, in seconds",
    ),
}
_MEDIA_ROW = (*MEDIA, *CLIP_SAMPLING)
_OTHER_MEDIA = (
    *("video_path", "video_paths", "video_url", "video_urls", "video_file"),
    *("image_path", "image_paths", "image_url", "image_urls", "image_file"),
)
# Columns that other trainers use, in a text -> why they are refused here.
_REASONS = {
    "audio audios audio_path audio_url speech": "no recipe trains on audio",
    "chosen rejected rejected_response rejected_messages rejected_images label kto_tag": (
        "this recipe trains on answers; recipes/dpo.py trains on `chosen` and `rejected`"
    ),
    "weight weights sample_weight loss_weight loss_scale mask loss_mask completion_mask assistant_masks": (
        "every token of an answer counts the same"
    ),
    "input": "it belongs to rows with `instruction` and `output`",
    "history": "earlier turns belong into `messages`",
    "chat_template chat_template_kwargs documents functions": "it is not passed to the chat template",
    "input_ids labels attention_mask segments": "rows are tokenized here",
    "system system_prompt tools": "a text has no messages: use `messages`, or put it into the text",
    "objects": "boxes and references are not put into the text",
}
_REFUSED = {
    **dict.fromkeys((*MEDIA, *_OTHER_MEDIA), "recipes/video_sft.py trains on `videos` and `images`"),
    **{name: reason for names, reason in _REASONS.items() for name in names.split()},
}
_HARMLESS_FOR_TEXT = ("label", "labels", "documents", "input", "history")  # of classification datasets, for example


def find_form(names: Iterable[str]) -> str | None:
    """The first form whose needed columns are all present."""
    names = set(names)
    return next((name for name, form in FORMS.items() if names.issuperset(form.needed)), None)


def accepted(with_media: bool) -> str:
    """The forms that a recipe takes, as its errors list them.

    Args:
        with_media: it trains on videos and images, which captions need.
    """
    return "; ".join(" + ".join(form.needed) for name, form in FORMS.items() if with_media or name != "caption")


@functools.cache
def find_refused(names: tuple[str, ...], form: str, with_media: bool = False) -> dict[str, str]:
    """The columns that a row must leave empty, and why.

    Args:
        with_media: the recipe trains on videos and images.
    """
    refused = {**_REFUSED, **(SAMPLING if with_media else {})}
    used = {*FORMS[form].needed, *FORMS[form].optional, *(_MEDIA_ROW if with_media else ())}
    if form == "text":
        used |= {*_HARMLESS_FOR_TEXT}
    for other_form in FORMS.values():  # datasets that carry the same rows in two forms
        if set(other_form.needed) <= set(names):
            used |= {*other_form.needed, *other_form.optional} - {*SYSTEM, "tools"}
    return {name: refused[name] for name in names if name in refused and name not in used}


def find_unused(names: Iterable[str], form: str, with_media: bool = False) -> list[str]:
    """Columns that are neither used nor refused."""
    used = {*FORMS[form].needed, *FORMS[form].optional, *(_MEDIA_ROW if with_media else ())}
    return sorted(set(names) - used - find_refused(tuple(names), form, with_media).keys())


def is_empty(value) -> bool:
    """True if a value is missing or empty; Arrow fills missing values with None."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def check_columns(row: dict, form: str, where: str, with_media: bool = False) -> None:
    """Check that a row leaves the columns of find_refused() empty.

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
        indices: `_indices` of a Dataset, its rows' numbers in the file if it was shuffled or split; else None.
    """
    return index if indices is None else indices.column(0)[index].as_py()
