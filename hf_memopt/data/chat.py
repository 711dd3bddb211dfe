"""Conversations of text: a chat template with the spans of its answers, and rows in the forms that TRL takes."""

import itertools
import json
import logging
import re
from functools import partial
from typing import Any

from hf_memopt.data.columns import SYSTEM, Judge, check_columns
from hf_memopt.data.turns import joined_text, read_messages, read_text, read_tools
from hf_memopt.errors import InputError, as_input_error, brief

logger = logging.getLogger(__name__)

# Templates may print these roles without naming them ("<|{{ role }}|>"); any other role must occur in the source.
_COMMON_ROLES = ("system", "user", "assistant", "tool", "developer")
# Synonyms, which transformers fills from each other. Templates drop them from earlier turns.
_REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys that say nothing of the text.
_METADATA = ("id", "message_id", "index", "turn", "turn_id", "timestamp", "language", "source", "model", "score")
_TOOLS = ("", "tools")  # in the place of (role, key)
_LETTER = {"type": "text", "text": "x"}


class Chat:
    """A chat template that is checked once per (role, key): does its text change when that key's value changes?

    Args:
        processor: a tokenizer, or a processor with one.
    """

    def __init__(self, processor) -> None:
        self.processor = processor
        self._checked: set[tuple[str, str]] = set()

    def text_and_answers(
        self, messages: list[dict], tools: list[dict] | None = None, where: str = "row"
    ) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, and the (start, end) of each answer in it, in characters, end marker included.

        An answer lies from the text of the conversation before it to that after it. Some templates rewrite earlier
        turns (they drop reasoning). Only the last answer can then be located.

        Args:
            where: names the row in errors.

        Raises:
            InputError: the template does not accept the messages, or omits a part of them.
        """
        text = self.check(messages, tools, where)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], tools, where, prompt=True)
                after = self._render(messages[: index + 1], tools, where)
                if after.startswith(before) and text.startswith(after):
                    spans.append((len(before), len(after)))
        return text, spans

    def check(self, messages: list[dict], tools: list[dict] | None, where: str) -> str:
        """The template's text, which has all of a row in it.

        Raises:
            InputError: see text_and_answers().
        """
        text = self._render(messages, tools, where)
        if tools and _TOOLS not in self._checked:
            if self._render(messages, None, where) == text:
                raise InputError(f"{where}: the chat template does not use tools: the column would be ignored")
            self._checked.add(_TOOLS)
        present = {(message["role"], key) for message in messages for key in message if key != "role"}
        for role, key in sorted(present - self._checked):
            self._check_key(messages, role, key, tools, text, where)
        return text

    def _render(self, messages: list[dict], tools, where: str, prompt: bool = False) -> str:
        with as_input_error(f"{where}: the chat template does not accept its messages", Exception):
            return self.processor.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )

    def _check_key(self, messages: list[dict], role: str, key: str, tools, text: str, where: str) -> None:
        if key == "content":
            if role not in _COMMON_ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self._source):
                raise InputError(f"{where}: the role {role!r} is unknown to the chat template")
            changed = [_longer(message) if message["role"] == role else message for message in messages]
            if changed == messages:  # only empty messages: a later row decides
                return
        else:
            changed = [
                {name: value for name, value in message.items() if name != key} if message["role"] == role else message
                for message in messages
            ]
        named = rf"\b({'|'.join(_REASONING)})\b"
        written = (
            re.search(named, self._source) is not None if key in _REASONING else self._differs(changed, tools, text)
        )
        if not written and key in _METADATA:
            logger.warning("messages have the key %r, which the chat template does not use", key)
        elif not written and key == "content":
            raise InputError(f"{where}: the chat template does not write messages of the role {role!r}")
        elif not written:
            raise InputError(
                f"{where}: a message of role {role!r} has {key!r}, which the chat template does not write: "
                "remove it, or use a model whose template does"
            )
        self._checked.add((role, key))

    def _differs(self, changed: list[dict], tools, text: str) -> bool:
        try:
            return self._render(changed, tools, "") != text
        except InputError:  # the template requires what was removed
            return True

    @property
    def _source(self) -> str:
        """The template's source; of several templates, all sources joined."""
        template: Any = self.processor.chat_template
        return "".join(template.values()) if isinstance(template, dict) else template or ""


def _longer(message: dict) -> dict:
    """The message with one more letter, unless it is empty."""
    content = message["content"]
    if not content:
        return message
    return {**message, "content": f"{content}x" if isinstance(content, str) else [*content, _LETTER]}


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
