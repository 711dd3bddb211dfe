"""Rows with videos and images, of any supported form, as chat messages and the media in their order."""

import re
from typing import Any, NamedTuple

from hf_memopt.data.columns import CLIP_SAMPLING, FORMS, SAMPLING, check_columns, find_form, is_empty
from hf_memopt.data.turns import read_messages
from hf_memopt.errors import InputError
from hf_memopt.video.downloads import display_url, is_url
from hf_memopt.video.frame_limits import IMAGE_SAMPLING, Sampling

_TAGS = re.compile(r"(<video>|<image>)")
_UNSUPPORTED_TAGS = re.compile(r"<audio>|<bbox>|<ref-object>")  # audio, and ms-swift's boxes
_KINDS = ("video", "image")
_AUDIO_PARTS = ("audio", "audio_url", "input_audio")
_SOURCE_KEYS = ("path", "url", "bytes")
_SAMPLING_KEYS = {"video": CLIP_SAMPLING, "image": IMAGE_SAMPLING}


class Medium(NamedTuple):
    """A video or an image of a row.

    Attributes:
        kind: "video" or "image".
        source: a path, bytes, {"path": …, "bytes": …} as `datasets` keeps them, or the paths of a video's frames.
        sampling: what the row says of its frames and their size.
    """

    kind: str
    source: Any
    sampling: Sampling = Sampling()


def conversation(row: dict, where: str, urls: bool = False) -> tuple[list[dict], list[Medium]]:
    """Messages whose content is a list of parts, and the media that they refer to.

    Supports all forms of columns.FORMS with messages. Content is a text with <video> and <image> tags (as in
    LLaMA-Factory and LLaVA) or a list of parts. Media are in the columns `videos` or `video` and `images` or `image`,
    or in the parts. Without tags, media come before the first user message's text. LLaVA-Video's rows write <image>
    for a video.

    Args:
        where: names the row in errors.
        urls: media may be http(s) addresses.

    Raises:
        InputError: numbers of tags and media differ, there is no answer, or a part or column would be ignored.
    """
    form = find_form(name for name, value in row.items() if not is_empty(value))
    if form in (None, "text"):
        *forms, last = (" + ".join(form.needed) for name, form in FORMS.items() if name not in ("text", "messages"))
        raise InputError(f"{where}: has neither messages nor {', '.join(forms)} nor {last}")
    check_columns(row, form, where, with_media=True)
    listed = {kind: _listed(row, kind) for kind in _KINDS}
    if form == "caption" and not any(listed.values()):
        raise InputError(f"{where}: its caption describes a `video` or an `image`, and the row has neither")
    messages = [_with_parts(message, where) for message in read_messages(row, form, where)]
    for part in (part for message in messages if message["role"] == "assistant" for part in message["content"]):
        if part["type"] in _KINDS:
            raise InputError(f"{where}: an answer has a {part['type']}, and answers are texts: put it into a question")
    parts = [part for message in messages for part in message["content"] if part["type"] in _KINDS]
    # Where a row has videos, no images and no <video>, <image> stands for a video, as in LLaVA-Video's data.
    only_videos = listed["video"] and not listed["image"] and not any("source" in part for part in parts)
    if only_videos and not any(part["type"] == "video" for part in parts):
        for part in parts:
            part["type"] = "video"
    # Put the media of a kind that has no tags before the first user message's text.
    tagged = {part["type"] for message in messages for part in message["content"]}
    user = next((message for message in messages if message["role"] == "user"), messages[0])
    for kind in reversed(_KINDS):
        if kind not in tagged:
            user["content"][:0] = [{"type": kind} for _ in listed[kind]]
    media = []
    for part in (part for message in messages for part in message["content"] if part["type"] in _KINDS):
        kind, source, sampling = part["type"], part.pop("source", None), part.pop("sampling", {})
        if source is None and not listed[kind]:
            raise InputError(f"{where}: has more <{kind}> tags than {kind}s")
        source = listed[kind].pop(0) if source is None else source
        sampling = sampling | (_sampling(source, kind) if isinstance(source, dict) else {})
        common = row if kind == "video" else {}  # a row's columns are of its videos
        media.append(Medium(kind, _check_source(source, kind, where, urls), Sampling.read(common, sampling, where)))
    for kind, unused in listed.items():
        if unused:
            raise InputError(f"{where}: has {len(unused)} {kind}(s) more than <{kind}> tags")
    return messages, media


def _listed(row: dict, kind: str) -> list:
    media = row.get(f"{kind}s")
    media = row.get(kind) if media is None else media
    return list(media) if isinstance(media, list | tuple) else [] if media is None else [media]


def _with_parts(message: dict, where: str) -> dict:
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    return {**message, "content": [normalized for part in parts for normalized in _parts(part, where)]}


def _parts(part, where: str) -> list[dict]:
    """A part of any spelling as {"type": …} parts; tags in a text become parts."""
    if isinstance(part, str):
        return _parts_of_text(part, where)
    if not isinstance(part, dict):
        raise InputError(f"{where}: a part of its content is {part!r}, which is neither text nor a mapping")
    kind = part.get("type") or next((kind for kind in (*_KINDS, "text") if part.get(kind) is not None), None)
    if kind == "text":
        _check_keys(part, ("type", "text"), where)
        return _parts_of_text(part.get("text") or "", where)
    if kind in _AUDIO_PARTS:
        raise InputError(f"{where}: a part is {kind!r}, and no recipe trains on audio: leave it out of the data")
    if kind not in _KINDS:
        raise InputError(
            f'{where}: unknown part {kind!r}. Write {{"type": "text", "text": …}}, {{"type": "video", '
            f'"video": "clips/door.mp4"}} or {{"type": "image", "image": "door.png"}}'
        )
    _check_keys(part, ("type", kind, "path", "url", *_SAMPLING_KEYS[kind]), where)
    source = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
    medium = {"type": kind, "sampling": _sampling(part, kind)}
    return [medium if source is None else {**medium, "source": source}]


def _sampling(mapping: dict, kind: str) -> dict[str, Any]:
    return {name: mapping[name] for name in _SAMPLING_KEYS[kind] if mapping.get(name) is not None}


def _check_keys(part: dict, keys: tuple[str, ...], where: str) -> None:
    for key, value in part.items():
        if key not in keys and not is_empty(value):
            reason = SAMPLING.get(key, "it is not one of " + ", ".join(keys))
            raise InputError(f"{where}: a part has {key!r}, which would be ignored: {reason}")


def _parts_of_text(text: str, where: str) -> list[dict]:
    """A text split at its tags; the line break after a tag, which LLaVA's data has, is dropped."""
    if tag := _UNSUPPORTED_TAGS.search(text):
        raise InputError(f"{where}: {tag[0]} in its text is not supported, and would be trained on as plain text")
    parts = []
    for piece in _TAGS.split(text):
        if _TAGS.fullmatch(piece):
            parts.append({"type": piece[1:-1]})
            continue
        piece = piece.removeprefix("\n") if parts and parts[-1]["type"] in _KINDS else piece
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts


def _check_source(source, kind: str, where: str, urls: bool):
    """A file's name or bytes, or an address.

    Raises:
        InputError: anything else. (Not BadVideo: an unsupported row is never skipped as a bad file.)
    """
    if isinstance(source, dict):
        _check_keys(source, (*_SOURCE_KEYS, *_SAMPLING_KEYS[kind]), where)
        if source.get("bytes"):
            return {name: value for name, value in source.items() if name in _SOURCE_KEYS}
        source = source.get("path") or source.get("url")
    if isinstance(source, bytes) and source:
        return source
    if isinstance(source, list | tuple) and kind == "video":
        return [_check_frame(frame, where, urls) for frame in source] or _check_source(None, kind, where, urls)
    if isinstance(source, list | tuple):
        raise InputError(f"{where}: an image is a list of {len(source)} files: write one path for each <image>")
    if not source:
        raise InputError(f"{where}: a {kind} names no file")
    if not hasattr(source, "__fspath__") and not isinstance(source, str):
        raise InputError(f"{where}: a {kind} is {source!r}, and must be a path")
    path = str(source).removeprefix("file://")
    if is_url(path) and urls:
        return path
    if is_url(path):
        raise InputError(
            f"{where}: {display_url(path)} is an address: download it and write the file's path, or allow downloads "
            "by --max_download_mib 500"
        )
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://|data:", path):
        raise InputError(f"{where}: {path[:100]} is not a file: download it, and write the file's path")
    return path


def _check_frame(frame, where: str, urls: bool) -> str:
    if not isinstance(frame, str):
        raise InputError(f"{where}: a frame of a video is {frame!r}, and must be a path")
    return _check_source(frame, "frame", where, urls)
