"""Rows with videos and images, in the forms that people have, as chat messages and the media in their order."""

import re
from typing import Any

from hf_memopt.data.columns import FORMS, SAMPLING, check_columns, find_form, is_empty
from hf_memopt.data.turns import read_messages
from hf_memopt.errors import InputError

_TAGS = re.compile(r"(<video>|<image>)")
_FOREIGN_TAGS = re.compile(r"<audio>|<bbox>|<ref-object>")  # of sound, and of ms-swift's boxes
_KINDS = ("video", "image")
_SOURCE_KEYS = ("path", "url", "bytes")

Medium = tuple[str, Any]  # "video" or "image", and a path, bytes, or {"path": …, "bytes": …} as `datasets` keeps them


def conversation(row: dict, where: str) -> tuple[list[dict], list[Medium]]:
    """Messages whose content is a list of parts, and the media that they refer to.

    Understood are all forms of columns.FORMS that have messages. Content is a text with <video> and <image> tags
    (LLaMA-Factory's, LLaVA's) or a list of parts. Media are in `videos` or `video` and `images` or `image`, or in the
    parts. Where no tag says otherwise, media come before the first user's text.

    Args:
        where: names the row in errors.

    Raises:
        InputError: tags and media are not equally many, a row has no answer, or it holds what would not be trained on.
    """
    form = find_form(name for name, value in row.items() if not is_empty(value))
    if form in (None, "text"):
        *others, last = (" + ".join(form.needed) for name, form in FORMS.items() if name not in ("text", "messages"))
        raise InputError(f"{where}: has neither messages nor {', '.join(others)} nor {last}")
    check_columns(row, form, where, with_media=True)
    listed = {kind: _listed(row, kind) for kind in _KINDS}
    messages = [_with_parts(message, where) for message in read_messages(row, form, where)]
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where}: has no answer (a message of the assistant)")
    _put_first(messages, listed)
    media = []
    for part in (part for message in messages for part in message["content"] if part["type"] in _KINDS):
        kind, given = part["type"], part.pop("given", None)
        if given is None and not listed[kind]:
            raise InputError(f"{where}: has more <{kind}> tags than {kind}s")
        media.append((kind, _source(given if given is not None else listed[kind].pop(0), kind, where)))
    for kind, left in listed.items():
        if left:
            raise InputError(f"{where}: has {len(left)} {kind}(s) more than <{kind}> tags")
    return messages, media


def _listed(row: dict, kind: str) -> list:
    found = row.get(f"{kind}s")
    found = row.get(kind) if found is None else found
    return list(found) if isinstance(found, list | tuple) else [] if found is None else [found]


def _with_parts(message: dict, where: str) -> dict:
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    return {**message, "content": [made for part in parts for made in _parts(part, where)]}


def _parts(part, where: str) -> list[dict]:
    """A part of any spelling as parts of one; a text's tags become parts."""
    if isinstance(part, str):
        return _parts_of_text(part, where)
    if not isinstance(part, dict):
        raise InputError(f"{where}: a part of its content is {part!r}, neither a text nor a mapping")
    kind = part.get("type") or next((kind for kind in (*_KINDS, "text") if part.get(kind) is not None), None)
    if kind == "text":
        _check_keys(part, ("type", "text"), where)
        return _parts_of_text(part.get("text") or "", where)
    if kind not in _KINDS:
        raise InputError(
            f'{where}: unknown part {kind!r}. Write {{"type": "text", "text": …}}, {{"type": "video", '
            f'"video": "clips/door.mp4"}} or {{"type": "image", "image": "door.png"}}'
        )
    _check_keys(part, ("type", kind, "path", "url"), where)
    given = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
    return [{"type": kind, "given": given} if given is not None else {"type": kind}]


def _check_keys(part: dict, known: tuple[str, ...], where: str) -> None:
    for key, value in part.items():
        if key not in known and not is_empty(value):
            reason = SAMPLING.get(key, "it is not one of " + ", ".join(known))
            raise InputError(f"{where}: a part has {key!r}, which would not be followed: {reason}")


def _parts_of_text(text: str, where: str) -> list[dict]:
    """A text cut at its tags; the line break after a tag, which LLaVA's data have, is none of the text's."""
    if foreign := _FOREIGN_TAGS.search(text):
        raise InputError(f"{where}: {foreign[0]} stands in its text, and would be trained on as these letters")
    parts = []
    for piece in _TAGS.split(text):
        if _TAGS.fullmatch(piece):
            parts.append({"type": piece[1:-1]})
            continue
        piece = piece.removeprefix("\n") if parts and parts[-1]["type"] in _KINDS else piece
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts


def _source(given, kind: str, where: str):
    """A file's name or bytes.

    Raises:
        InputError: something else, which is no bad file but a row of another form.
    """
    if isinstance(given, dict):
        _check_keys(given, _SOURCE_KEYS, where)
        if given.get("bytes"):
            return given
        given = given.get("path") or given.get("url")
    if isinstance(given, bytes) and given:
        return given
    if isinstance(given, list | tuple):
        raise InputError(f"{where}: a {kind} is a list of {len(given)} frames or files: write them as one video file")
    if not given:
        raise InputError(f"{where}: a {kind} names no file")
    if not hasattr(given, "__fspath__") and not isinstance(given, str):
        raise InputError(f"{where}: a {kind} is {given!r}, and must be a path")
    path = str(given).removeprefix("file://")
    if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://|data:", path):
        raise InputError(f"{where}: {path[:100]} is not a file: download it, and name the file")
    return path


def _put_first(messages: list[dict], listed: dict[str, list]) -> None:
    """Where a kind has no tag at all, its media stand before the first user's text."""
    used = {part["type"] for message in messages for part in message["content"]}
    user = next((message for message in messages if message["role"] == "user"), messages[0])
    for kind in reversed(_KINDS):
        if kind not in used:
            user["content"][:0] = [{"type": kind} for _ in listed[kind]]
