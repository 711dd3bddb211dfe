"""A model's chat template: the text of a conversation, the spans of its answers, and whether it drops anything."""

import logging
import re
from typing import Any

from hf_memopt.errors import InputError, as_input_error

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
            changed = [_without(message, key) if message["role"] == role else message for message in messages]
        if key in _REASONING:
            written = re.search(rf"\b({'|'.join(_REASONING)})\b", self._source) is not None
        else:
            written = self._differs(changed, tools, text)
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


def _without(message: dict, key: str) -> dict:
    return {name: value for name, value in message.items() if name != key}
