"""Rows of any supported form as messages for a chat template, with system message and tools."""

import json
from typing import Any

from hf_memopt.data.columns import MEDIA, SYSTEM, is_empty
from hf_memopt.errors import InputError, brief

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_CALLS = ("tool_calls", "function_call")  # an answer that calls a function may have no text
_FILLERS = "\u2800\u3164"  # printable, and nothing to see; other such letters are not printable
_MAY_BE_BLANK = ("system", "developer", "tool")  # what a tool returns, and instructions, may be nothing


def read_messages(row: dict, form: str, where: str) -> list[dict]:
    """A row's messages, with `role`, `content` (a text or a list of parts) and any other keys.

    Args:
        form: a name in columns.FORMS that has messages.
        where: names the row in errors.

    Raises:
        InputError: the row does not have the form.
    """
    turns = _turns(row, form, where)
    if not isinstance(turns, list | tuple):
        raise InputError(f"{where}: {form} must be a list of messages, not {_brief(turns)}")
    if not turns:
        raise InputError(f"{where}: {form} is empty: give it a question and an answer, or remove the row")
    messages = [_message(turn, where) for turn in turns]
    _check_turns(messages, where, with_media=not all(is_empty(row.get(name)) for name in MEDIA))
    given = [name for name in SYSTEM if not is_empty(row.get(name))]
    texts = {read_text(row, name, where, may_be_blank=True).strip(): row[name] for name in given}
    if len(texts) > 1:
        raise InputError(f"{where}: the columns {' and '.join(SYSTEM)} differ")
    system = next(iter(texts.values()), None)
    if not system:
        return messages
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if joined_text(messages[0]["content"], where).strip() != system.strip():
        raise InputError(f"{where}: the column `system` differs from the system message that its messages begin with")
    return messages


def read_tools(row: dict, where: str) -> list[dict] | None:
    """The functions that the assistant may call, in OpenAI's format; None where a row has none.

    Raises:
        InputError: any other format.
    """
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise InputError(f"{where}: tools is not JSON: {_brief(tools)}") from None
    if is_empty(tools) or tools == "":
        return None
    for tool in tools if isinstance(tools, list | tuple) else [tools]:
        if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
            raise InputError(
                f"{where}: tools must be a list of functions as OpenAI writes them, "
                f'{{"type": "function", "function": {{"name": …, "parameters": …}}}}, not {_brief(tools)}'
            )
    return without_nones(list(tools) if isinstance(tools, list | tuple) else [tools])


def without_nones(value: Any) -> Any:
    """The value without keys that are None: Arrow fills in every key that some other row has."""
    if isinstance(value, dict):
        return {key: without_nones(item) for key, item in value.items() if item is not None}
    return [without_nones(item) for item in value] if isinstance(value, list | tuple) else value


def joined_text(content, where: str) -> str:
    """Content as one text.

    Raises:
        InputError: a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list | tuple):
        raise InputError(f"{where}: the content of a message must be a text or a list of parts, not {_brief(content)}")
    return "".join(part if isinstance(part, str) else _part_text(part, where) for part in content)


def is_blank(content) -> bool:
    """True of a message's content that is missing or has no letter: a text, or a list of parts."""
    if isinstance(content, str):
        return not any(letter.isprintable() and not letter.isspace() and letter not in _FILLERS for letter in content)
    if isinstance(content, list | tuple):
        return all(map(is_blank, content))
    if isinstance(content, dict) and content.get("type", "text") == "text":
        values = (value for key, value in content.items() if key != "type")
        return all(value is None or is_blank(value) for value in values)
    return content is None


def _part_text(part, where: str) -> str:
    part = part if isinstance(part, dict) else {"type": _brief(part)}
    kind = part.get("type", "text")
    keys = [key for key, value in part.items() if key not in ("type", "text") and not is_empty(value)]
    if kind == "text" and not keys:
        text = part.get("text")
        if text is not None and not isinstance(text, str):
            raise InputError(f"{where}: a part of the content must have a text, not {_brief(text)}")
        return text or ""
    name = kind if kind != "text" else keys[0]
    raise InputError(
        f"{where}: the content has a part {name!r}, and this recipe trains on text only "
        "(videos and images: recipes/video_sft.py)"
    )


def _turns(row: dict, form: str, where: str):
    if form in ("messages", "conversations"):
        return row[form]
    if form == "alpaca":
        context = "" if is_empty(row.get("input")) else f"\n\n{read_text(row, 'input', where)}"
        question = read_text(row, "instruction", where, may_be_blank=bool(context.strip())) + context
        return [_turn("user", question), _turn("assistant", read_text(row, "output", where))]
    if form == "caption":
        return [_turn("user", ""), _turn("assistant", read_text(row, "caption", where))]
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) and isinstance(completion, list):
        if not prompt:
            raise InputError(f"{where}: prompt is empty: fill it, or remove the row")
        return [*prompt, *completion]
    return [_turn("user", read_text(row, "prompt", where)), _turn("assistant", read_text(row, "completion", where))]


def read_text(row: dict, name: str, where: str, may_be_blank: bool = False) -> str:
    """A column that holds a text.

    Raises:
        InputError: it holds none, or one without a letter.
    """
    if not isinstance(row[name], str):
        raise InputError(f"{where}: {name} must be a text, not {_brief(row[name])}")
    if not may_be_blank and is_blank(row[name]):
        raise InputError(f"{where}: {name} is empty: fill it, or remove the row")
    return row[name]


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _message(turn, where: str) -> dict:
    if not isinstance(turn, dict):
        raise InputError(f"{where}: a message must be a mapping with role and content, not {_brief(turn)}")
    role = next((turn[key] for key in _ROLE_KEYS if turn.get(key) is not None), None)
    if not isinstance(role, str):
        raise InputError(f"{where}: a message has no role: {_brief(turn)}")
    content = next((turn[key] for key in _CONTENT_KEYS if turn.get(key) is not None), None)
    if not isinstance(content, str | list | None):
        raise InputError(f"{where}: the content of a message must be a text or a list of parts, not {_brief(content)}")
    extra = {key: value for key, value in turn.items() if key not in (*_ROLE_KEYS, *_CONTENT_KEYS)}
    extra = {key: without_nones(value) for key, value in extra.items() if not is_empty(value)}
    return {"role": _ROLES.get(role, role), "content": content, **extra}


def _check_turns(messages: list[dict], where: str, with_media: bool) -> None:
    """Check that a conversation has an answer, behind a question, and that nothing in it is missing.

    Args:
        with_media: a question may be a video or an image of the row alone.

    Raises:
        InputError: it is not so.
    """
    for message in messages:
        role, content = message["role"], message["content"]
        name = "the answer" if role == "assistant" else f"a message of the role {role!r}"
        calls = role == "assistant" and any(_has_call(message.get(key)) for key in _CALLS)
        if content is None and not calls:
            raise InputError(f"{where}: {name} has no content (null): fill it, or remove the row")
        if is_blank(content) and not (calls or role in _MAY_BE_BLANK or (role == "user" and with_media)):
            raise InputError(f"{where}: {name} is empty: fill it, or remove the row")
        message["content"] = content or ""
    roles = [message["role"] for message in messages]
    if next((role for role in roles if role not in ("system", "developer")), "") == "assistant":
        raise InputError(f"{where}: begins with an answer: put the question before it, or remove the answer")
    if "assistant" not in roles:
        raise InputError(f"{where}: has no answer (a message of the assistant)")


def _has_call(calls) -> bool:
    """True if a message calls a function: of several, any that is named."""
    return any(map(_has_call, calls)) if isinstance(calls, list | tuple) else isinstance(calls, dict) and bool(calls)


def _brief(value) -> str:
    text = brief(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
