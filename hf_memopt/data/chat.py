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
        """The template's text, and the (start, end) of each answer in it, in characters.

        Where the template marks what the assistant generates ({% generation %}), these are the answers, else those of
        answers_by_prefix(). benchmarks/libraries.py compares the two on TRL's training templates: they agree on most;
        prefixes miss answers where the prompt for an answer opens a thinking block (DeepSeek, Nemotron) or earlier
        turns are rewritten (gpt-oss, Phi). Few models' own templates have marks.

        Args:
            where: names the row in errors.

        Raises:
            InputError: the template does not accept the messages, or omits a part of them.
        """
        self.check(messages, tools, where)
        if re.search(r"\{%-?\s*generation\s*-?%\}", self._source):
            return self._render_marked(messages, tools, where)
        text = self._render(messages, tools, where)
        return text, self.answers_by_prefix(text, messages, tools, where)

    def answers_by_prefix(
        self, text: str, messages: list[dict], tools: list[dict] | None = None, where: str = "row"
    ) -> list[tuple[int, int]]:
        """Each answer's span, end marker included: from the text of the conversation before it to that after it.

        Some templates rewrite earlier turns (they drop reasoning). Only the last answer can then be located.

        Args:
            text: the template's text of all messages.
        """
        spans = []
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                before = self._render(messages[:index], tools, where, prompt=True)
                after = self._render(messages[: index + 1], tools, where)
                if after.startswith(before) and text.startswith(after):
                    spans.append((len(before), len(after)))
        return spans

    def _render(self, messages: list[dict], tools, where: str, prompt: bool = False) -> str:
        with as_input_error(f"{where}: the chat template does not accept its messages", Exception):
            return self.processor.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=prompt
            )

    def _render_marked(self, messages: list[dict], tools, where: str) -> tuple[str, list[tuple[int, int]]]:
        """The text and the spans within {% generation %}.

        apply_chat_template(return_assistant_tokens_mask=True) turns these spans into a mask of tokens. The characters
        are needed here, because a video's tokens are inserted before the text is tokenized.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = getattr(self.processor, "tokenizer", self.processor)
        with as_input_error(f"{where}: the chat template does not accept its messages", Exception):
            (text,), (spans,) = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template(tools),
                return_assistant_tokens_mask=True,
                **tokenizer.special_tokens_map,
            )
        return text, [(start, end) for start, end in spans if start < end]

    def _template(self, tools) -> str:
        """The template that apply_chat_template() uses."""
        template: Any = self.processor.chat_template
        if isinstance(template, dict):
            return template["tool_use"] if tools is not None and "tool_use" in template else template["default"]
        return template

    def check(self, messages: list[dict], tools: list[dict] | None, where: str) -> None:
        """Check that the template writes all of a row. Rows without new roles and keys cost next to nothing.

        Raises:
            InputError: see text_and_answers().
        """
        if messages and messages[0]["role"] == "assistant":
            raise InputError(f"{where}: begins with an answer: put the question before it, or remove the answer")
        present = {(message["role"], key) for message in messages for key in message if key != "role"}
        new = sorted((present | ({_TOOLS} if tools else set())) - self._checked)
        text = self._render(messages, tools, where) if new else ""
        for role, key in new:
            if (role, key) == _TOOLS:
                self._check_tools(messages, text, where)
            else:
                self._check_key(messages, role, key, tools, text, where)

    def _check_tools(self, messages: list[dict], text: str, where: str) -> None:
        if self._render(messages, None, where) == text:
            raise InputError(f"{where}: the chat template does not use tools: the column would be ignored")
        self._checked.add(_TOOLS)

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
