"""The settings that a plan chose, as a diff of the user's own file or command."""

import copy
import difflib
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from hf_memopt.errors import InputError
from hf_memopt.foreign.commands import parse_commands
from hf_memopt.foreign.key_table import Table, as_text
from hf_memopt.foreign.source import Source, read_command, read_settings
from hf_memopt.job.spec import JobSpec

_ENGINES = ("training.deepspeed", "training.fsdp")  # of a launcher's file
_DASHES = "--key-with-dashes value"
# Of the keys that a plan sets, those that axolotl's command has no option for (axolotl/cli/config_options.py).
_NO_OPTION = ("cut_cross_entropy",)

# Options of accelerate launch that a plan does not choose: where processes run and meet, and what is logged of them;
# and a precision that it leaves to the trainer.
_MACHINES = re.compile(
    "--(?:gpu_ids|main_.*|machine_rank|same_network|rdzv_.*|role|tee|log_dir|max_restarts|monitor_interval|quiet|debug|"
    "mixed_precision|num_cpu_threads_per_process|enable_cpu_affinity|deepspeed_hostfile)"
)
_COUNTS = re.compile("--(?:standalone|nproc_per_node|num_gpus)")  # of torchrun and deepspeed, on one machine


def chosen_keys(table: Table, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Their keys and values for settings that a plan chose."""
    chosen = (table.theirs(name, value) for name, value in ours.items() if name in table.plan)
    return {key: value for keys in chosen for key, value in keys.items()}


def changes(source: Source, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Those keys that the file does not have so yet, be it by their tool's default; None takes a key out."""
    present = dict(source.table.defaults) | source.launch | _dotted(source.settings)
    return {key: value for key, value in keys.items() if not _same(present.get(key), value)}


def changed_keys(source: Source, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Their keys and values that settings of a plan change in a file; None takes a key out."""
    return changes(source, chosen_keys(source.table, ours))


def in_words(keys: Mapping[str, Any]) -> str:
    """Changed keys as a sentence's end; None is a key that is taken out."""
    pairs = [f"{key}: {json.dumps(value)}" for key, value in keys.items() if value is not None]
    removed = [key for key, value in keys.items() if value is None]
    parts = [f"set these: {', '.join(pairs)}"] if pairs else []
    return "; ".join([*parts, f"take out {', '.join(removed)}"] if removed else parts)


def _same(present: Any, value: Any) -> bool:
    if isinstance(value, list):
        return set(map(str, value)) <= set(map(str, present if isinstance(present, list) else []))
    return as_text(present) == as_text(value) or (present is None and value is False)


def planned(source: Source, ours: Mapping[str, Any]) -> JobSpec:
    """The job that a file would describe with the settings of a plan in it."""
    settings, engine = copy.deepcopy(dict(source.settings)), dict(source.engine)
    for key, value in changed_keys(source, ours).items():
        _put(settings, key.split("."), value)
    if source.table.launched:
        engine = {name: value for name, value in engine.items() if not name.startswith(_ENGINES)}
    return replace(source, settings=settings, engine=engine).translate().spec()


def _put(settings: dict[str, Any], names: list[str], value: Any) -> None:
    """Set a key, take it out (None), or add to its list."""
    name, *inside = names
    if inside:
        _put(settings.setdefault(name, {}), inside, value)
    elif value is None:
        settings.pop(name, None)
    else:
        settings[name] = [*_listed(settings.get(name)), *value] if isinstance(value, list) else value


def edit(source: Source, keys: Mapping[str, Any]) -> str | None:
    """The text of a file or command with changed keys; all else, comments too, stays as it is.

    Returns:
        None where no text was found that its tool reads as these changes and no others.
    """
    text = source.text
    try:
        for key, value in keys.items():
            edited = _edit_command(source, text, key, value) if source.command else _edit_yaml(text, key, value)
            if edited is None:
                return None
            text = edited
        again = read_command(source.path, text) if source.command else read_settings(source.path or Path(), text)
    except (InputError, yaml.YAMLError):
        return None
    before, after = _leaves(source.settings), _leaves(again.settings)
    within = (*keys, *(f"{key}.*" for key, value in keys.items() if value is None))
    others = {key for key in before.keys() | after.keys() if not any(fnmatchcase(key, name) for name in within)}
    kept = all(set(map(str, _listed(before.get(key)))) <= set(map(str, _listed(after.get(key)))) for key in keys)
    same = all(as_text(before.get(key)) == as_text(after.get(key)) for key in others)
    same = same and (again.engine == source.engine or source.table.launched)  # whose engine is the launcher's
    return text if kept and same and not changes(again, keys) else None


def launched(text: str, launcher: str) -> str:
    """The text of a command that starts as a plan says, but for what its own launcher says of machines; the same text
    where another says that, a module is started, or a program stands before a plan's variables."""
    words, kept = parse_commands(text).launcher, []
    if words and "=" in launcher.split()[0] and text[: words[0].start].rpartition("\n")[2].strip():
        return text
    for word, after in zip_longest(words, words[1:]):
        name, equals, _ = word.text.partition("=")
        name = re.sub(r"(?<=\w)-", "_", name)
        if _MACHINES.fullmatch(name) and (name != "--mixed_precision" or name not in launcher):
            launcher = re.sub(rf" {name} \S+", "", launcher)
            apart = after is not None and not equals and not after.text.startswith("-")
            kept.append(text[word.start : after.end if apart else word.end])
        elif name.startswith("-") and not words[0].text.endswith("accelerate") and not _COUNTS.fullmatch(name):
            return text
    return text[: words[0].start] + " ".join([launcher, *kept]) + text[words[-1].end :] if words else text


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _leaves(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _dotted(settings).items() if not isinstance(value, Mapping)}


def diff(source: Source, text: str | None) -> str:
    """The unified diff that makes the text of a file or command; nothing where there is no text."""
    if text is None:
        return ""
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


def _edit_yaml(text: str, key: str, value: Any) -> str | None:
    """Replace the value of a key, add one to a list, add the key, or take it out."""
    node, rest, pair = yaml.compose(text), key.split("."), None
    while rest and isinstance(node, yaml.MappingNode):
        found = next((pair for pair in node.value if pair[0].value == rest[0]), None)
        if found is None:
            break
        pair, node, rest = found, found[1], rest[1:]
    if value is None:
        return _without_line(text, pair) if pair and not rest else None
    if rest:
        return _added(text, node if pair else None, rest, value)
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(node, yaml.SequenceNode) and isinstance(value, list) and node.value:
        at, indent = node.value[-1].end_mark.index, " " * node.start_mark.column
        items = [f", {item}" if node.flow_style else f"\n{indent}- {item}" for item in value]
        return text[:at] + "".join(items) + text[at:]
    if anchor := re.match(r"&\S+\s+", text[start:end]):
        start += anchor.end()
    space = "" if start and text[start - 1].isspace() else " "  # `key:` of nothing ends at its colon
    return text[:start] + space + _dumped(value).removesuffix("...\n").strip() + text[end:]


def _added(text: str, parent: yaml.Node | None, names: list[str], value: Any) -> str | None:
    """A text with a new key: at its end, or as the first of the mapping that it belongs to."""
    if parent is None:
        where = "\n" if text and not text.endswith("\n") else ""
        return f"{text}{where}{_dumped({'.'.join(names): value})}"
    if not isinstance(parent, yaml.MappingNode) or len(names) > 1:
        return None
    line, start = _dumped({names[0]: value}).strip(), parent.start_mark.index
    if parent.flow_style:
        return f"{text[: start + 1]}{line}{', ' if parent.value else ''}{text[start + 1 :]}"
    return f"{text[:start]}{line}\n{' ' * parent.start_mark.column}{text[start:]}"


def _without_line(text: str, pair: tuple[yaml.Node, yaml.Node]) -> str:
    start, end = text.rfind("\n", 0, pair[0].start_mark.index) + 1, text.find("\n", _end(pair[1])) + 1
    return text[:start] + (text[end:] if end else "")


def _end(node: yaml.Node) -> int:
    """The place after a value; a block's own end is where the next key begins."""
    if isinstance(node, yaml.ScalarNode) or node.flow_style or not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end(last[1] if isinstance(node, yaml.MappingNode) else last)


def _dumped(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=None if isinstance(value, list) else False)


def _edit_command(source: Source, text: str, key: str, value: Any) -> str | None:
    """Replace an argument, take it out, or write it after the command's last word."""
    command = parse_commands(text)
    if command.style == _DASHES and (isinstance(value, list) or key in _NO_OPTION):
        return None
    names = (key, key.removesuffix("._component_"))  # torchtune's component=NAME
    own = [argument for argument in command.arguments if argument.key in names and argument.end]
    word = _written(command.style, own[-1].key if own else key, value)
    if own and value is not None:
        return text[: own[-1].start] + word + text[own[-1].end :]
    for argument in reversed(own):
        head = re.sub(r"(?:\s|\\\n)+$", "", text[: argument.start])
        text = head + text[argument.end :]
    if own and key not in _dotted(read_command(source.path, text).settings):
        return text
    if value is None and "=" not in command.style:
        return None  # a file's key, which no option takes out
    command = parse_commands(text)
    head, line = text[: command.end], text[: command.end].rpartition("\n")[2]
    indent = line[: len(line) - len(line.lstrip())]
    joint = f" \\\n{indent}" if head.removesuffix(line).endswith("\\\n") else " "
    return f"{head}{joint}{word}{text[command.end :]}"


def _written(style: str, key: str, value: Any) -> str:
    """An argument in the words of a command's tool."""
    word = shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))
    if "=" in style:
        return f"~{key}" if value is None else f"{key}={word}"
    return f"--{key.replace('_', '-') if style == _DASHES else key} {word}"
