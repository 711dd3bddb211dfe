"""Rows in the forms that TRL's SFTTrainer takes, each checked before anything is loaded."""

import itertools
import json
from functools import partial
from typing import Any

from hf_memopt.data.chat import Chat
from hf_memopt.data.columns import SYSTEM, Judge, check_columns
from hf_memopt.data.turns import joined_text, read_messages, read_text, read_tools
from hf_memopt.errors import InputError, brief

_FIRST = 1_000  # rows whose majority says what the others have to be
# https://huggingface.co/docs/trl/dataset_formats. Messages and tools are JSON, so that Arrow fills in no keys.
_KINDS = {
    "text": ("text",),
    "prompt and completion": ("prompt", "completion"),
    "messages": ("messages", "tools"),
    "prompt and completion of messages": ("prompt", "completion", "tools"),
}


def find_answer_kind(rows, form: str) -> str:
    """The form of TRL's that rows of a form of columns.FORMS become, by most of the first rows."""
    if form != "prompt/completion":
        return "text" if form == "text" else "messages"
    first = list(itertools.islice(iter(rows), _FIRST))
    if 2 * sum(isinstance(row["prompt"], list) for row in first) > len(first):
        return "prompt and completion of messages"
    # Two texts follow each other as they are, unless there is a system message, which only chats have.
    return "messages" if any(name in row for row in first for name in SYSTEM) else "prompt and completion"


def answer_judge(form: str, kind: str, tokenizer) -> Judge:
    """What refuses rows of a form that TRL's SFTTrainer cannot train on.

    Args:
        kind: what find_answer_kind() returns for the rows.
        tokenizer: whose chat template has to write all of a row; None where it is not known.

    Raises:
        InputError: the rows are messages, and the tokenizer has no chat template.
    """
    chat = None
    if "messages" in kind and tokenizer is not None:
        if not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template for rows of messages: use a model that has one, or write rows as "
                "texts, `prompt` and `completion`"
            )
        chat = Chat(tokenizer)
    return partial(read_answer, form=form, kind=kind, chat=chat)


def to_trl(rows, form: str, kind: str, split: bool = False):
    """Rows as TRL takes them, with no other columns.

    Args:
        rows: that answer_judge() does not refuse.
        form: of columns.FORMS.
        kind: as answer_judge() took it.
        split: make a sample of every answer, with the conversation up to it as its prompt: for chat templates that do
            not mark what the assistant writes.
    """
    from datasets import Features, Json, Value

    def convert(row: dict) -> dict[str, Any]:
        return read_answer(row, "", form, kind)

    def features(kind: str):
        feature = Json() if "messages" in kind else Value("string")
        return Features({name: Value("string") if name == "tools" else feature for name in _KINDS[kind]})

    settings: dict[str, Any] = {"remove_columns": rows.column_names or list(next(iter(rows), {}))}
    described = {"desc": "converting rows"} if hasattr(rows, "__len__") else {}
    converted = rows.map(convert, features=features(kind), **settings, **described)
    if not (split and kind == "messages"):
        return converted
    prompts = features("prompt and completion of messages")
    return converted.map(_each_answer, batched=True, remove_columns=["messages"], features=prompts)


def read_answer(row: dict, where, form: str, kind: str, chat: Chat | None = None) -> dict[str, Any]:
    """A row as TRL takes it.

    Args:
        where: names the row in errors.
        chat: the template that has to write all of the row; None where that is known, or there is none.

    Raises:
        InputError: the row cannot be trained on.
    """
    check_columns(row, form, where)
    return _of_messages(row, form, kind, chat, where) if "messages" in kind else _plain(row, _KINDS[kind], where)


def _plain(row: dict, names: tuple[str, ...], where) -> dict[str, str]:
    if len(names) > 1 and read_tools(row, where):
        raise InputError(f"{where}: tools are for messages: write prompt and completion as lists of messages")
    for name in names:
        if not isinstance(row[name], str):
            again = "" if name == "text" else " here, as in most rows"
            raise InputError(f"{where}: {name} must be a text{again}, not {brief(row[name])}")
    return {name: read_text(row, name, where) for name in names}


def _of_messages(row: dict, form: str, kind: str, chat: Chat | None, where) -> dict[str, Any]:
    messages = [
        {**message, "content": joined_text(message["content"], where)} for message in read_messages(row, form, where)
    ]
    tools = read_tools(row, where)
    if chat is not None:
        chat.check(messages, tools, where)
    converted: dict[str, Any] = {"tools": json.dumps(tools) if tools else None}
    if kind == "messages":
        return converted | {"messages": messages}
    if not isinstance(row["prompt"], list):
        raise InputError(f"{where}: prompt and completion must be lists of messages here, as in most rows")
    prompts = len(messages) - len(row["completion"])
    prompt, completion = messages[:prompts], messages[prompts:]
    if not any(message["role"] == "assistant" for message in completion):
        raise InputError(f"{where}: completion has no answer (a message of the assistant)")
    return converted | {"prompt": prompt, "completion": completion}


def _each_answer(batch: dict[str, list]) -> dict[str, list]:
    pairs = [
        (messages[:place], [message], tools)
        for messages, tools in zip(batch["messages"], batch["tools"], strict=True)
        for place, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    return dict(zip(("prompt", "completion", "tools"), map(list, zip(*pairs, strict=True)), strict=True))
