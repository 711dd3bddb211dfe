"""Rows in the forms that TRL's SFTTrainer takes, each checked before anything is loaded."""

import json
from typing import Any

from hf_memopt.data.chat import Chat
from hf_memopt.data.columns import SYSTEM, check_columns, row_number
from hf_memopt.data.row_places import Place
from hf_memopt.data.turns import joined_text, read_messages, read_tools
from hf_memopt.errors import InputError, brief

# https://huggingface.co/docs/trl/dataset_formats. Messages and tools are JSON, so that Arrow fills in no keys.
_KINDS = {
    "text": ("text",),
    "prompt and completion": ("prompt", "completion"),
    "messages": ("messages", "tools"),
    "prompt and completion of messages": ("prompt", "completion", "tools"),
}


def find_answer_kind(rows, form: str) -> str:
    """The form of TRL's that rows of a form of columns.FORMS become."""
    if form != "prompt/completion":
        return "text" if form == "text" else "messages"
    first = next(iter(rows))
    if isinstance(first["prompt"], list):
        return "prompt and completion of messages"
    # Two texts follow each other as they are, unless there is a system message, which only chats have.
    return "messages" if any(name in first for name in SYSTEM) else "prompt and completion"


def to_trl(rows, form: str, kind: str, tokenizer, source: str = "", split: bool = False):
    """Rows as TRL takes them, with no other columns.

    Args:
        form: of columns.FORMS.
        kind: what find_answer_kind() returned for the training rows.
        split: make a sample of every answer, with the conversation up to it as its prompt: for chat templates that do
            not mark what the assistant writes.

    Raises:
        InputError: names the row that cannot be trained on.
    """
    from datasets import Features, Json, Value

    chat = Chat(tokenizer) if "messages" in kind else None
    numbers, streamed = getattr(rows, "_indices", None), not hasattr(rows, "__len__")

    def convert(row: dict, index: int) -> dict[str, Any]:
        where = Place(source, row_number(numbers, index), dict(row) if streamed else None)
        check_columns(row, form, where)
        return _plain(row, _KINDS[kind], where) if chat is None else _of_messages(row, form, kind, chat, where)

    def features(kind: str):
        feature = Value("string") if chat is None else Json()
        return Features({name: Value("string") if name == "tools" else feature for name in _KINDS[kind]})

    settings: dict[str, Any] = {"remove_columns": rows.column_names or list(next(iter(rows)))}
    described = {} if streamed else {"desc": "checking rows"}
    converted = rows.map(convert, with_indices=True, features=features(kind), **settings, **described)
    if not (split and kind == "messages"):
        return converted
    prompts = features("prompt and completion of messages")
    return converted.map(_each_answer, batched=True, remove_columns=["messages"], features=prompts)


def _plain(row: dict, names: tuple[str, ...], where) -> dict[str, str]:
    if len(names) > 1 and read_tools(row, where):
        raise InputError(f"{where}: tools are for messages: write prompt and completion as lists of messages")
    for name in names:
        if not isinstance(row[name], str):
            again = "" if name == "text" else " here, as in the first row"
            raise InputError(f"{where}: {name} must be a text{again}, not {brief(row[name])}")
    return {name: row[name] for name in names}


def _of_messages(row: dict, form: str, kind: str, chat: Chat, where) -> dict[str, Any]:
    messages = [
        {**message, "content": joined_text(message["content"], where)} for message in read_messages(row, form, where)
    ]
    tools = read_tools(row, where)
    chat.check(messages, tools, where)
    converted: dict[str, Any] = {"tools": json.dumps(tools) if tools else None}
    if kind == "messages":
        return converted | {"messages": messages}
    if not isinstance(row["prompt"], list):
        raise InputError(f"{where}: prompt and completion must be lists of messages here, as in the first row")
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
