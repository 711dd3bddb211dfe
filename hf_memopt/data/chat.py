"""A model's chat template: the text of a conversation, where its answers lie, and whether all of it is written."""

import logging
import re
from typing import Any

from hf_memopt.errors import InputError, one_line

logger = logging.getLogger(__name__)

# Roles that a template may write by their name alone; any other must stand in its text.
_USUAL_ROLES = ("system", "user", "assistant", "tool", "developer")
# One thing under several names, which transformers fills from each other. Templates drop it from earlier turns.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_METADATA = (
    "id",
    "message_id",
    "turn",
    "turn_id",
    "index",
    "timestamp",
    "created_at",
    "language",
    "lang",
    "source",
    "model",
    "score",
    "toxic",
    "redacted",
)
_TOOLS = ("", "tools")  # in place of a role and its key
_LETTER = {"type": "text", "text": "x"}


class Chat:
    """A chat template that is asked, once for each role and key, whether it writes what the role's messages hold.

    Args:
        processor: a tokenizer, or a processor with one.
    """

    def __init__(self, processor) -> None:
        self.processor = processor
        self._written: set[tuple[str, str]] = set()

    def text_and_answers(
        self, messages: list[dict], tools: list[dict] | None = None, where: str = "row"
    ) -> tuple[str, list[tuple[int, int]]]:
        """The template's text, and the spans of what the assistant says, its end marker included.

        Each span is found by rendering the conversation up to and after the answer. Some templates rewrite earlier
        turns (they drop reasoning); then only the last answer has a certain place, and only it is trained.

        Args:
            where: names the row in errors.

        Raises:
            InputError: the template does not take the messages, or leaves something of them out.
        """
        self.check(messages, tools, where)
        whole = self._render(messages, tools, where)
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], tools, where, prompt=True)
                after = self._render(messages[: index + 1], tools, where)
                if after.startswith(before) and whole.startswith(after):
                    spans.append((len(before), len(after)))
        return whole, spans

    def _render(self, messages: list[dict], tools, where: str, prompt: bool = False) -> str:
        try:
            return self.processor.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # a template is somebody's program: what it raises is its own
            raise InputError(f"{where}: the chat template does not take its messages ({one_line(error)})") from error

    def check(self, messages: list[dict], tools: list[dict] | None, where: str) -> None:
        """Raise where the template does not write all of a row. Rows that hold nothing new cost next to nothing.

        Raises:
            InputError: see text_and_answers().
        """
        if messages and messages[0]["role"] == "assistant":
            raise InputError(f"{where}: begins with an answer: put what it answers before it, or take it out")
        held = {(message["role"], key) for message in messages for key in message if key != "role"}
        new = sorted((held | ({_TOOLS} if tools else set())) - self._written)
        whole = self._render(messages, tools, where) if new else ""
        for role, key in new:
            if (role, key) == _TOOLS:
                self._check_tools(messages, whole, where)
            else:
                self._check(messages, role, key, tools, whole, where)

    def _check_tools(self, messages: list[dict], whole: str, where: str) -> None:
        if self._render(messages, None, where) == whole:
            raise InputError(f"{where}: the chat template does not use tools, so that the column would be lost")
        self._written.add(_TOOLS)

    def _check(self, messages: list[dict], role: str, key: str, tools, whole: str, where: str) -> None:
        if key == "content":
            if role not in _USUAL_ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", self._source):
                raise InputError(f"{where}: the role {role!r} is not one that the chat template knows")
            changed = [_longer(message) if message["role"] == role else message for message in messages]
            if changed == messages:  # nothing but empty messages: another row will tell
                return
        else:
            changed = [_without(message, key) if message["role"] == role else message for message in messages]
        if key in _REASONING:
            written = re.search(rf"\b({'|'.join(_REASONING)})\b", self._source) is not None
        else:
            written = self._differs(changed, tools, whole)
        if not written and key in _METADATA:
            logger.warning("messages have the key %r, which is not used", key)
        elif not written and key == "content":
            raise InputError(f"{where}: the chat template does not write messages of the role {role!r}")
        elif not written:
            raise InputError(
                f"{where}: a message of role {role!r} has {key!r}, which the chat template does not write: take it "
                "out, or use a model whose template does"
            )
        self._written.add((role, key))

    def _differs(self, changed: list[dict], tools, whole: str) -> bool:
        try:
            return self._render(changed, tools, "") != whole
        except InputError:  # the template insists on what was taken away
            return True

    @property
    def _source(self) -> str:
        """The template's text; of several, all."""
        template: Any = self.processor.chat_template
        return "".join(template.values()) if isinstance(template, dict) else template or ""


def _longer(message: dict) -> dict:
    """The message with a letter more, unless it is empty."""
    content = message["content"]
    if not content:
        return message
    return {**message, "content": f"{content}x" if isinstance(content, str) else [*content, _LETTER]}


def _without(message: dict, key: str) -> dict:
    return {name: value for name, value in message.items() if name != key}
