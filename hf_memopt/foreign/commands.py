"""A shell command that trains, as the settings of its tool; nothing is run, no variable is looked up elsewhere."""

import re
import shlex
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief, one_line
from hf_memopt.yaml_values import read_yaml

_SWIFT = ("sft", "pt", "rlhf")
_TRL = ("sft", "dpo", "kto", "reward", "grpo", "rloo")
# Scripts of TRL, open-r1 and alignment-handbook, whose trainers are TRL's.
_SCRIPT = re.compile(r"(?:run_)?(dpo_online|sft|dpo|kto|reward|reward_modeling|grpo|rloo|orpo|gkd|cpo)(?:_\w+)?\.py")
_LAUNCHERS = ("accelerate", "torchrun")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_MEGATRON = "its Megatron backend keeps weights, gradients and optimizer states otherwise than a Trainer: not modelled"


@dataclass
class Command:
    """A training command.

    Attributes:
        tool: the name of its table.
        settings: its arguments.
        config: the file that it names, whose settings its arguments override.
        launch: the options of `accelerate launch`.
        environment: the variables set in the script.
    """

    tool: str
    settings: dict[str, Any]
    config: str | None = None
    launch: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)


def parse_commands(text: str) -> Command:
    """The one training command of a script or a command line.

    Raises:
        InputError: there is none, several, or one whose trainer is not modelled.
    """
    environment: dict[str, str] = {}
    commands: list[Command] = []
    for line in _lines(text):
        own = dict(environment)
        argv = _split(line, environment)
        if argv and argv[0] == "export":
            argv = argv[1:]
            own = environment
        while argv and (assignment := _ASSIGNMENT.fullmatch(argv[0])):
            own[assignment[1]] = assignment[2]
            argv = argv[1:]
        if not argv:
            environment |= own
        elif command := _recognized(argv):
            command.environment = own | command.environment
            commands.append(command)
    if not commands:
        raise InputError("no command here trains with ms-swift, LLaMA-Factory, torchtune, axolotl or TRL")
    if len(commands) > 1:
        raise InputError(f"{len(commands)} commands here train: ask about one of them")
    return commands[0]


def _lines(text: str) -> list[str]:
    """Logical lines without comments: a backslash continues one, also before a comment line."""
    lines: list[str] = []
    joined = ""
    for line in text.splitlines():
        stripped = _without_comment(line.strip(), joined)
        if not stripped:
            continue
        joined += f" {stripped.removesuffix(chr(92))}"
        if not stripped.endswith("\\") and not _is_open(joined):
            lines.append(joined.strip())
            joined = ""
    return [line for line in [*lines, joined.strip()] if line]


def _without_comment(line: str, before: str) -> str:
    """A line up to its comment: a # that begins a word outside quotes (shlex would cut words at theirs)."""
    marks = [match.start() for match in re.finditer(r"(?:^|(?<=\s))#", line)]
    return next((line[:at].rstrip() for at in marks if not _is_open(f"{before} {line[:at]}")), line)


def _is_open(text: str) -> bool:
    """True if a quote is not closed yet."""
    try:
        shlex.split(text)
    except ValueError:
        return True
    return False


def _split(line: str, variables: Mapping[str, str]) -> list[str]:
    """The words of a line, with the values of variables that the script sets, and of sums of them."""

    def value(text: str) -> str:
        defaults = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: variables.get(match[1], match[2]), text)
        return string.Template(defaults).safe_substitute(variables)

    def number(match: re.Match[str]) -> str:
        left, right = value(match[1]), value(match[3])
        if not (left.isdecimal() and right.isdecimal() and int(right)):
            return match[0]
        operator = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__floordiv__}[match[2][-1]]
        return str(operator(int(left), int(right)))

    line = re.sub(r"\$\((?:expr|\()\s*([\w${}]+)\s*(\\?[-+*/])\s*([\w${}]+)\s*\)?\)", number, line)
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise InputError(f"{brief(line)} is not readable as a command: {one_line(error)}") from error
    return [value(word) for word in words]


def _recognized(argv: list[str]) -> Command | None:
    name, rest = Path(argv[0]).name, argv[1:]
    first = rest[0] if rest else ""
    if name in ("nohup", "exec", "sudo", "time"):
        return _recognized(rest) if rest else None
    if name == "megatron" and first in _SWIFT:
        raise InputError(f"ms-swift: megatron {first}: {_MEGATRON}")
    if name == "swift" and first in _SWIFT:
        return _with_config("ms_swift", {"command": first, **_options(rest[1:])})
    if name in ("llamafactory-cli", "lmf") and first == "train":
        return _with_file("llama_factory", rest[1:])
    if name == "axolotl" and first == "train":
        return _with_file("axolotl", rest[1:])
    if name == "trl" and first in _TRL:
        return _with_config("trl", {"trainer": first, **_options(rest[1:])})
    if name == "tune" and first == "run":
        return _torchtune(rest[1:])
    if name in _LAUNCHERS or name.startswith("python"):
        return _script(rest[1:] if first == "launch" else rest, accelerated=first == "launch")
    return None


def _with_config(tool: str, settings: dict[str, Any]) -> Command:
    config = settings.pop("config", None)
    return Command(tool, settings, config=config and str(config))


def _with_file(tool: str, rest: list[str]) -> Command:
    """A command whose first word is a file, or that has arguments alone."""
    config = rest[0] if rest and not rest[0].startswith("-") else None
    settings = _options(rest[1 if config else 0 :])
    return Command(tool, settings, config=config)


def _torchtune(rest: list[str]) -> Command | None:
    """tune run [torchrun's arguments] RECIPE --config FILE key=value …"""
    recipe = next((number for number, word in enumerate(rest) if _is_recipe(rest, number)), None)
    if recipe is None or "--config" not in rest[recipe:]:
        return None
    at = rest.index("--config", recipe)
    settings: dict[str, Any] = {"recipe": rest[recipe]}
    for word in rest[at + 2 :]:
        key, equals, value = word.partition("=")
        if equals:
            _nest(settings, key.lstrip("-"), read_yaml(value, key))
    processes = _options(rest[:recipe]).get("nproc_per_node") or _options(rest[:recipe]).get("nproc-per-node")
    settings |= {"nproc_per_node": processes} if processes else {}
    return Command("torchtune", settings, config=rest[at + 1] if at + 1 < len(rest) else None)


def _is_recipe(words: list[str], number: int) -> bool:
    follows_option = number and words[number - 1].startswith("--") and "=" not in words[number - 1]
    return not words[number].startswith("-") and not follows_option


def _nest(settings: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        settings = settings.setdefault(parent, {})
    settings[name] = value


def _script(words: list[str], accelerated: bool) -> Command | None:
    """A script of TRL's, or a module that stands for a command, under a launcher or Python itself."""
    if command := _module(words):
        return _launched(command, _options(words[: words.index(command.settings.pop("program"))]), accelerated)
    at = next((number for number, word in enumerate(words) if _SCRIPT.fullmatch(Path(word).name)), None)
    if at is None:
        return None
    trainer = _SCRIPT.fullmatch(Path(words[at]).name)[1]
    command = _with_config("trl", {"trainer": trainer.removesuffix("_modeling"), **_options(words[at + 1 :])})
    return _launched(command, _options(words[:at]), accelerated)


def _launched(command: Command, options: dict[str, Any], accelerated: bool) -> Command:
    """A command with the processes and the options of its launcher."""
    command.launch = options if accelerated else {}
    processes, nodes = options.get("num_processes") or options.get("nproc_per_node"), options.get("nnodes", 1)
    if isinstance(processes, int) and isinstance(nodes, int):
        processes *= nodes
    elif nodes != 1:
        command.environment["NNODES"] = str(nodes)
    command.environment |= {"NPROC_PER_NODE": str(processes)} if processes else {}
    return command


def _module(words: list[str]) -> Command | None:
    """`python -m axolotl.cli.train FILE`, `python swift/cli/sft.py …`."""
    for number, word in enumerate(words):
        if word == "axolotl.cli.train":
            command = _with_file("axolotl", words[number + 1 :])
            command.settings["program"] = word
            return command
        if match := re.fullmatch(r"(?:.*/)?swift/cli/(sft|pt|rlhf)\.py", word):
            return _with_config("ms_swift", {"command": match[1], "program": word, **_options(words[number + 1 :])})
    return None


def _options(words: list[str]) -> dict[str, Any]:
    """Arguments as argparse reads them: --key value …, --key=value, --switch, --no_switch."""
    options: dict[str, Any] = {}
    key = None
    for word in words:
        if word in (">", ">>", "2>&1", "|", "&", "&&", ";") or re.match(r"^\d?>", word):
            break
        if re.match(r"--[A-Za-z]", word):
            key, equals, value = word[2:].partition("=")
            key = key.replace("-", "_")
            options[key] = [read_yaml(value, key)] if equals else []
        elif key is not None:
            if "$(" in word:
                raise InputError(f"--{key} {brief(word)}: no command is run: write its value")
            options[key].append(argument_value(word))
    switches = {key.removeprefix("no_"): key[:3] != "no_" for key, values in options.items() if not values}
    given = {key: values[0] if len(values) == 1 else values for key, values in options.items() if values}
    return switches | given


def argument_value(word: str) -> Any:
    """A value as YAML reads it; what is not YAML stays a text."""
    try:
        return read_yaml(word, "value")
    except InputError:
        return word
