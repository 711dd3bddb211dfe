"""Rows with videos and images, in the formats that people have, as chat messages and the media in their order."""

import re
from typing import Any

from hf_memopt.errors import InputError

_TAGS = re.compile(r"(<video>|<image>)")
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_KINDS = ("video", "image")

Medium = tuple[str, Any]  # "video" or "image", and a path, bytes, or {"path": …, "bytes": …} as `datasets` keeps them


def conversation(row: dict, where: str) -> tuple[list[dict], list[Medium]]:
    """Messages whose content is a list of parts, and the media that they refer to.

    Understood are `messages` with `role` and `content`, a text with <video> and <image> tags (LLaMA-Factory's) or a
    list of parts; and `conversations` with `from` and `value` (LLaVA's). Media are in `videos` or `video` and `images`
    or `image`, or in the parts. Where no tag says otherwise, media come before the first user's text.

    Args:
        where: names the row in errors.

    Raises:
        InputError: tags and media are not equally many, or a row has no answer.
    """
    turns = row.get("messages") or row.get("conversations")
    if not turns:
        raise InputError(f"{where}: has neither messages nor conversations")
    listed = {kind: _listed(row, kind) for kind in _KINDS}
    messages = [_message(turn) for turn in turns]
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{where}: has no answer (a message of the assistant)")
    _put_first(messages, listed)
    media = []
    for part in (part for message in messages for part in message["content"] if part["type"] in _KINDS):
        kind, given = part["type"], part.pop("given", None)
        if given is None and not listed[kind]:
            raise InputError(f"{where}: has more <{kind}> tags than {kind}s")
        media.append((kind, given if given is not None else listed[kind].pop(0)))
    for kind, left in listed.items():
        if left:
            raise InputError(f"{where}: has {len(left)} {kind}(s) more than <{kind}> tags")
    return messages, media


def _listed(row: dict, kind: str) -> list:
    found = row.get(f"{kind}s")
    found = row.get(kind) if found is None else found
    return list(found) if isinstance(found, list | tuple) else [] if found is None else [found]


def _message(turn: dict) -> dict:
    content = turn.get("content", turn.get("value"))
    parts = _parts_of_text(content or "") if not isinstance(content, list) else [_part(part) for part in content]
    return {"role": role_of(turn), "content": parts}


def role_of(turn: dict) -> str:
    """system, user or assistant, by whatever name."""
    role = turn.get("role") or turn.get("from")
    return _ROLES.get(role, role)


def _parts_of_text(text: str) -> list[dict]:
    """A text cut at its tags; the line break after a tag, which LLaVA's data have, is none of the text's."""
    parts = []
    for piece in _TAGS.split(text):
        if _TAGS.fullmatch(piece):
            parts.append({"type": piece[1:-1]})
            continue
        piece = piece.removeprefix("\n") if parts and parts[-1]["type"] in _KINDS else piece
        if piece.strip():
            parts.append({"type": "text", "text": piece})
    return parts


def _part(part: dict) -> dict:
    kind = part.get("type") or next((kind for kind in (*_KINDS, "text") if part.get(kind) is not None), "text")
    if kind not in _KINDS:
        return {"type": "text", "text": part.get("text") or ""}
    given = next((part[name] for name in (kind, "path", "url") if part.get(name) is not None), None)
    return {"type": kind, "given": given} if given is not None else {"type": kind}


def _put_first(messages: list[dict], listed: dict[str, list]) -> None:
    """Where a kind has no tag at all, its media stand before the first user's text."""
    used = {part["type"] for message in messages for part in message["content"]}
    user = next((message for message in messages if message["role"] == "user"), messages[0])
    for kind in reversed(_KINDS):
        if kind not in used:
            user["content"][:0] = [{"type": kind} for _ in listed[kind]]
