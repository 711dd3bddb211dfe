"""The settings that a plan chose, as a diff of the user's own file or command."""

import difflib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from hf_memopt.foreign.source import Source
from hf_memopt.foreign.table import Table, as_text


def chosen_keys(table: Table, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Their keys and values for settings that a plan chose."""
    keys: dict[str, Any] = {}
    for name, value in ours.items():
        if name in table.plan:
            keys |= table.theirs(name, value)
    return keys


def changes(source: Source, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Those keys that the file does not have so yet, be it by their tool's default."""
    present = dict(source.table.defaults) | _dotted(source.settings)
    return {key: value for key, value in keys.items() if not _same(present.get(key), value)}


def _same(present: Any, value: Any) -> bool:
    if isinstance(value, list):
        return set(map(str, value)) <= set(map(str, present if isinstance(present, list) else []))
    return as_text(present) == as_text(value) or (present is None and value is False)


def edit(source: Source, keys: Mapping[str, Any]) -> str:
    """The text of a file or command with changed keys; all else, comments too, stays as it is."""
    text = source.text
    for key, value in keys.items():
        text = _edit_command(text, key, value) if source.is_command else _edit_yaml(text, key, value)
    return text


def diff(source: Source, text: str) -> str:
    """The unified diff that makes the text of a file or command."""
    name = source.path or "command"
    lines = [part.splitlines(keepends=True) for part in (_ended(source.text), _ended(text))]
    return "".join(difflib.unified_diff(*lines, str(name), str(name)))


def _ended(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def _dotted(settings: Mapping[str, Any], within: str = "") -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for key, value in settings.items():
        pairs[f"{within}{key}"] = value
        if isinstance(value, Mapping):
            pairs |= _dotted(value, f"{within}{key}.")
    return pairs


def _edit_yaml(text: str, key: str, value: Any) -> str:
    """Replace the value of a key, add one to a list, or append the key."""
    node, rest = yaml.compose(text), key.split(".")
    while rest and isinstance(node, yaml.MappingNode):
        pair = next((pair for pair in node.value if pair[0].value == rest[0]), None)
        if pair is None:
            break
        node, rest = pair[1], rest[1:]
    if rest:
        where = "\n" if text and not text.endswith("\n") else ""
        return f"{text}{where}{_dumped({key: value})}"
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list) and node.value and not node.flow_style:
        at, indent = node.value[-1].end_mark.index, " " * (node.start_mark.column)
        return text[:at] + "".join(f"\n{indent}- {item}" for item in value) + text[at:]
    start, end = node.start_mark.index, node.end_mark.index
    space = "" if start and text[start - 1].isspace() else " "  # `key:` of nothing ends at its colon
    return text[:start] + space + _dumped(value).removesuffix("...\n").strip() + text[end:]


def _dumped(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, default_flow_style=None if isinstance(value, list) else False)


def _edit_command(text: str, key: str, value: Any) -> str:
    """Replace the value of an argument, or append it to the last line."""
    word = str(value).lower() if isinstance(value, bool) else str(value)
    flag = rf"(--{re.escape(key)}(?:\s+|=))[^\s\\]+"
    if re.search(flag, text):
        return re.sub(flag, lambda match: f"{match[1]}{word}", text, count=1)
    body = text.rstrip()
    joint = " \\\n    " if "\\\n" in body else " "
    return f"{body}{joint}--{key} {word}{text[len(body) :]}"
