"""Tokens, keys and passwords stay out of everything that is printed or written: the one place that knows them."""

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

REDACTED = "<redacted>"

# Names of secrets, as TrainingArguments (hub_token), trackers (api_key) and clouds (aws_secret_access_key) write them.
_SECRET = re.compile(
    r"(?:^|_)(?:token|password|passwd|passphrase|secret|credentials?|apikey|authorization)(?:_|$)"
    r"|(?:^|_)(?:api|access|auth|private|account|encryption|wandb|hub|hf)_key(?:_id)?(?:_|$)|_key$"
)
# The vocabulary's own tokens (pad_token, eos_token, …) and what counts or places tokens are no secrets.
_SPECIAL_TOKEN = re.compile(
    r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|mask|image|video|audio|vision|special|decoder_start|per)_token(?:_|$)"
    r"|(?:^|_)token_(?:ids?|type|indices|count|budget|limit|size|embeddings?)(?:_|$)"
)
# What hubs and clouds issue can be recognised without a name: Hugging Face, OpenAI and Anthropic, GitHub, GitLab, AWS,
# Slack, JSON web tokens, and the user and password of a URL. Every repetition is bounded: linear
# time on any line.
_ISSUED = re.compile(
    r"\b(?:hf_|api_org_)[A-Za-z0-9]{16,200}|\bsk-[A-Za-z0-9_-]{16,200}|\bgh[pousr]_[A-Za-z0-9]{20,255}"
    r"|\bgithub_pat_\w{20,255}|\bglpat-[\w-]{16,100}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abprs]-[\w-]{10,200}"
    r"|\beyJ[\w-]{8,2000}\.eyJ[\w-]{8,4000}\.[\w-]{8,2000}|(?<=://)[^\s/@:]{1,200}:[^\s/@]{1,500}(?=@)"
)
# `name=value`, `name: value`, `"name": "value"`, and `--name value` after a mere space: in prose "token" is an
# ordinary word. The name has to hold one of these words already here, or an innocent pair before it would swallow it.
_NAMED = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]{0,80}(?:token|key|passw|passphrase|secret|credential|authoriz)[\w.-]{0,30})"""
    r"""(?P<between>["']?\s{0,3}[=:]\s{0,3}(?:Bearer\s|Basic\s)?|\s{1,3})"""
    r"""(?P<value>"[^"\n]{1,4000}"|'[^'\n]{1,4000}'|[^\s"',;)}\]]{1,4000})""",
    re.IGNORECASE,
)
_SHORTEST = 8  # characters; a shorter secret of the environment would blank ordinary words


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """True if a field, an argument or a variable of this name holds a token, key or password."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+", "_", name[-200:]).lower().strip("_")
    return bool(_SECRET.search(snake)) and not _SPECIAL_TOKEN.search(snake)


def redact(value: Any) -> Any:
    """A copy without secrets, of whatever JSON can hold; keys of mappings are the names that decide."""
    return _redact(value, "", _environment_secrets())


def _redact(value: Any, name: str, secrets: list[str]) -> Any:
    # An empty field tells no secret, nor does what TrainingArguments.to_dict() writes in a token's place.
    if is_secret(name) and not (value is None or isinstance(value, bool) or value in ("", f"<{name.upper()}>")):
        return REDACTED
    if isinstance(value, Mapping):
        return {key: _redact(item, str(key), secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_redact(item, "", secrets) for item in value]
    return _redact_text(value, secrets) if isinstance(value, str) else value


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without secrets: `--hub_token x` and `--hub_token=x`, and what else redact_text() finds."""
    words, hidden = [], False
    for word in argv:
        name, equals, _ = word.partition("=")
        if hidden:
            words.append(REDACTED)
        elif equals and is_secret(name):
            words.append(f"{name}={REDACTED}")
        else:
            words.append(redact_text(word))
        hidden = not hidden and not equals and word.startswith("-") and is_secret(word)
    return words


def redact_text(text: str) -> str:
    """A text without secrets: values beside a secret's name, tokens of known form, secrets of the environment."""
    return _redact_text(text, _environment_secrets())


def _redact_text(text: str, secrets: list[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    return _NAMED.sub(_redacted_pair, _ISSUED.sub(REDACTED, text))


def without_secrets(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are no secrets, for files that are to be run: a placeholder there would be used as a token."""
    return {
        name: without_secrets(value) if isinstance(value, Mapping) else value
        for name, value in fields.items()
        if not is_secret(str(name))
    }


def _redacted_pair(match: re.Match) -> str:
    name, between, value = match["name"], match["between"], match["value"]
    if not is_secret(name) or (not between.strip() and not name.startswith("-")):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{name}{between}{quote}{REDACTED}{quote}"


def _environment_secrets() -> list[str]:
    """HF_TOKEN, WANDB_API_KEY and whatever else the environment names so; the longest first."""
    values = {value for name, value in os.environ.items() if is_secret(name) and len(value) >= _SHORTEST}
    return sorted(values, key=len, reverse=True)
