"""A shell command that trains, as the settings of its tool; nothing is run, no variable is looked up elsewhere.

No word of it is dropped: each is a prefix, a launcher, a program, an option or a setting, or the command is refused.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.foreign.launchers import (
    LAUNCHERS,
    MODULES,
    POSITIONALS,
    PREFIXES,
    Launch,
    argument_value,
    launcher_options,
    refuse_unknown,
    take_options,
)
from hf_memopt.foreign.shell import Simple, Word, simple_commands

_TRL = "sft|dpo|kto|reward|grpo|rloo"
# Scripts of TRL, open-r1 and alignment-handbook, whose trainers are TRL's.
_SCRIPT = re.compile(
    r"(?:.*/)?(run_)?(dpo_online|sft|dpo|kto|reward|reward_modeling|grpo|rloo|orpo|gkd|cpo)(?:_\w+)?\.py"
)
# A program or module with the words that must follow it, or a script, as text -> its tool; the group is a setting.
_PROGRAMS = (
    ("ms_swift", re.compile(r"(?:swift|swift\.cli\.main|(?:.*/)?swift/cli/main\.py) (sft|pt|rlhf)")),
    ("megatron", re.compile(r"(?:megatron|swift\.cli\._megatron\.main) (sft|pt|rlhf)")),
    ("ms_swift", re.compile(r"(?:swift\.cli\.|(?:.*/)?swift/cli/)(sft|pt|rlhf)(?:\.py)?")),
    (
        "llama_factory",
        re.compile(r"(?:llamafactory-cli|lmf|llamafactory\.(?:cli|launcher)|(?:.*/)?llamafactory/cli\.py) train"),
    ),
    ("llama_factory", re.compile(r"(?:.*/)?src/train\.py|(?:.*/)?llamafactory/launcher\.py|llamafactory\.launcher")),
    ("axolotl", re.compile(r"(?:axolotl|axolotl\.cli\.main|(?:.*/)?axolotl/cli/main\.py) train")),
    ("axolotl", re.compile(r"axolotl\.cli\.train|(?:.*/)?axolotl/cli/train\.py")),
    ("trl", re.compile(rf"(?:trl|trl\.cli|trl\.cli\.main) ({_TRL})")),
    ("trl", re.compile(rf"trl\.scripts\.({_TRL})")),
    ("torchtune", re.compile(r"(?:tune|torchtune\._cli\.tune) run")),
)
_OWN_LAUNCHERS = {
    "ms_swift": "ms-swift",
    "llama_factory": "LLaMA-Factory",
    "axolotl": "accelerate",
    "trl": "accelerate",
}
_FILE = (".yaml", ".yml", ".json")
_MEGATRON = "its Megatron backend keeps weights, gradients and optimizer states otherwise than a Trainer: not modelled"
# Programs of a command line that is no model.
WORDS = re.compile(
    r"python[\d.]*|swift|megatron|llamafactory-cli|lmf|axolotl|tune|trl|accelerate|torchrun|deepspeed|uvx?|srun|docker"
)


@dataclass(frozen=True)
class Argument:
    """A setting of a command, its value None where it takes the key out; and where it stands in the text."""

    key: str
    value: Any
    start: int
    end: int
    removed: bool = False


@dataclass
class Command:
    """A training command.

    Attributes:
        tool: the name of its table.
        settings: what its program says beside its arguments.
        arguments: in their order.
        config: the file that it names, whose settings its arguments override.
        style: how its arguments are written: `--key value`, `--key-with-dashes value` or `key=value`.
        launch: how its processes start.
        launcher: the words that say so, before its program.
        environment: the variables that it sees.
        folder: into which the script changed before it.
        end: where its last word ends.
    """

    tool: str
    settings: dict[str, Any]
    arguments: list[Argument]
    config: str | None = None
    style: str = "--key value"
    launch: Launch = field(default_factory=lambda: Launch("python"))
    launcher: Sequence[Word] = ()
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = ""
    end: int = 0

    def over(self, below: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of its file under those of its arguments."""
        settings = {**below, **self.settings}
        for argument in self.arguments:
            if "=" in self.style:
                _override(settings, argument, components=self.tool == "torchtune")
            else:
                settings[argument.key] = argument.value
        return settings


def parse_commands(text: str) -> Command:
    """The one training command of a script or a command line.

    Raises:
        InputError: there is none, several, or one whose trainer is not modelled.
    """
    commands: list[Command] = []
    folder, last = "", None
    for simple in simple_commands(text):
        argv = [word.text for word in simple.words]
        if argv and argv[0].startswith("-") and last:
            raise InputError(f"{brief(' '.join(argv))} is a command of its own: the line before it ends the command")
        if argv[:1] == ["cd"] and len(argv) == 2 and not re.search(r"[$`]", argv[1]):
            folder = os.path.join(folder, argv[1])
        last = _recognized(simple.words, dict(simple.environment))
        if last:
            last.folder, last.end = folder, last.end or simple.words[-1].end
            commands.append(last)
    if not commands:
        raise InputError("no command here trains with ms-swift, LLaMA-Factory, torchtune, axolotl or TRL")
    if len(commands) > 1:
        raise InputError(f"{len(commands)} commands here train: ask about one of them")
    return commands[0]


def _recognized(words: Sequence[Word], environment: dict[str, str]) -> Command | None:
    """The training command that words are, without what stands before its program."""
    while words:
        name = Path(words[0].text).name
        size = next((size for size in (2, 1) if " ".join([name, *_texts(words[1:size])]) in PREFIXES), 0)
        if not size:
            break
        prefix = " ".join([name, *_texts(words[1:size])])
        options, words = take_options(words[size:], PREFIXES[prefix].split().__contains__)
        if prefix == "env" and ({"i", "u"} & options.keys()):
            environment = {} if "i" in options else {k: v for k, v in environment.items() if k != options["u"]}
        words = words[POSITIONALS.get(prefix, 0) :]
        while prefix in ("env", "sudo") and words and re.match(r"\w+=", words[0].text):
            key, _, value = words[0].text.partition("=")
            environment, words = environment | {key: value}, words[1:]
    if not words:
        return None
    if command := _started(words):
        command.environment = environment
        return command
    name = Path(words[0].text).name
    if name not in ("echo", "printf"):
        quoted = [inner.words for word in words[1:] if " " in word.text for inner in _readable(word.text)]
        for part in [*(words[at:] for at in range(1, len(words))), *quoted]:
            if part and _started(part, check=False):
                started = brief(" ".join(_texts(part)))
                raise InputError(f"{name} starts {started} in a way that is not known: ask about that command")
    return None


def _readable(text: str) -> list[Simple]:
    try:
        return list(simple_commands(text))
    except InputError:
        return []


def _texts(words: Sequence[Word]) -> list[str]:
    return [word.text for word in words]


def _started(words: Sequence[Word], check: bool = True) -> Command | None:
    """A program that trains, under a launcher or not.

    Args:
        check: read its arguments, too.
    """
    name = Path(words[0].text).name
    launcher = "python" if re.fullmatch(r"python[\d.]*", name) else name
    rest = words[1:]
    if launcher == "accelerate":
        launcher, rest = ("accelerate", rest[1:]) if _texts(rest[:1]) == ["launch"] else ("", rest)
    if launcher not in LAUNCHERS:
        return _program([Word(name, words[0].start, words[0].end), *rest], None, check)
    options, rest = launcher_options(launcher, rest)
    module = options.pop("m", None) or options.pop("module", None)
    options.pop("module", None)
    if not rest:
        return None
    if launcher == "python" and module and (nested := MODULES.get(rest[0].text)):
        command = _started([*(Word(word, 0, 0) for word in nested.split()), *rest[1:]], check)
    else:
        command = _program(rest, Launch(launcher, options), check)
    if command and check:
        refuse_unknown(Launch(launcher, options))
        command.launcher = () if module else words[: -len(rest)]
    return command


def _program(words: Sequence[Word], launch: Launch | None, check: bool) -> Command | None:
    first, second = words[0].text, " ".join(_texts(words[:2]))
    for tool, pattern in _PROGRAMS:
        size = 2 if " " in pattern.pattern else 1
        match = pattern.fullmatch(second if size == 2 else first)
        if match is None or (launch is None and size == 1):
            continue
        if tool == "megatron":
            raise InputError(f"ms-swift: megatron {match[1]}: {_MEGATRON}")
        if size == 2:  # a program that starts processes itself
            by = "torchtune" if tool == "torchtune" else _OWN_LAUNCHERS[tool]
            launch = Launch(by) if launch is None or launch.by == "python" else launch
        if not check:
            return Command(tool, {}, [])
        group = match[1] if match.lastindex else ""
        return _READERS[tool](words[size:], launch, group, size == 2)
    if launch and (match := _SCRIPT.fullmatch(first)):
        trainer = match[2].removesuffix("_modeling")
        own = first.endswith(f"trl/scripts/{match[2]}.py")
        return _trl(words[1:], launch, trainer, named=own) if check else Command("trl", {}, [])
    return None


def _swift(words: Sequence[Word], launch: Launch, command: str, main: bool) -> Command:
    config, words = _first_file(words) if main else (None, words)  # swift/cli/main.py alone reads one
    return Command("ms_swift", {"command": command}, _options(words, "ms-swift"), config, launch=launch)


def _trl(words: Sequence[Word], launch: Launch, trainer: str, named: bool) -> Command:
    """A trainer of TRL's.

    Args:
        named: it takes a file by --config only; scripts of others may take it as their first word.
    """
    config, words = (None, words) if named else _first_file(words)
    arguments = _options(words, "TRL")
    config = next((str(argument.value) for argument in arguments if argument.key == "config"), config)
    arguments = [argument for argument in arguments if argument.key != "config"]
    return Command("trl", {"trainer": trainer}, arguments, config, launch=launch)


def _llama_factory(words: Sequence[Word], launch: Launch, *_: Any) -> Command:
    """src/llamafactory/hparams/parser.py, read_args(): key=value after a file, --key value without one."""
    config, words = _first_file(words)
    if config is None:
        return Command("llama_factory", {}, _options(words, "LLaMA-Factory"), launch=launch)
    return Command("llama_factory", {}, _pairs(words, "LLaMA-Factory"), config, "key=value", launch)


def _axolotl(words: Sequence[Word], launch: Launch, _: str, main: bool) -> Command:
    """A file among options of a value each; `axolotl train` passes what follows -- on to its launcher."""
    at = next((number for number, word in enumerate(words) if word.text == "--"), len(words))
    words, rest = words[:at], words[at + 1 :]
    config, arguments = None, []
    for argument in _options(words, "axolotl", positional=True):
        values = argument.value if isinstance(argument.value, list) else [argument.value]
        values = [value for value in values if value is not None]
        file = next((value for value in values if config is None and str(value).endswith((".yml", ".yaml"))), None)
        if file is not None and (len(values) > 1 or argument.key not in ("cloud", "sweep")):
            config = file
            values.remove(file)
        if len(values) > 1 or (values and not argument.key):
            raise InputError(f"axolotl takes no word {brief(str(values[-1]))} here")
        if argument.key:
            value = values[0] if values else True
            arguments.append(Argument(argument.key, value, argument.start, argument.end))
    own = {argument.key: argument.value for argument in arguments}
    launcher = own.get("launcher", "accelerate")
    if main and launch.by == "accelerate" and launcher in LAUNCHERS:
        options, extra = launcher_options(launcher, rest)
        if extra:
            raise InputError(f"axolotl takes no word {brief(extra[0].text)} after --")
        options |= {"num_processes": own["num_processes"]} if "num_processes" in own else {}
        launch = Launch(launcher, options)
        refuse_unknown(launch)
    arguments = [
        argument for argument in arguments if argument.key not in ("launcher", "num_processes", "main_process_port")
    ]
    end = words[-1].end if words else 0
    return Command("axolotl", {}, arguments, config, "--key-with-dashes value", launch, end=end)


def _torchtune(words: Sequence[Word], launch: Launch, *_: Any) -> Command | None:
    """tune run [torchrun's arguments] RECIPE --config FILE key=value …"""
    options, words = launcher_options("torchrun", words)
    texts = _texts(words)
    if not texts:
        return None
    if "--config" not in texts[:-1]:
        raise InputError("tune run: torchtune reads its file as --config FILE, in two words")
    at = texts.index("--config")
    arguments = _pairs([*words[1:at], *words[at + 2 :]], "torchtune")
    refuse_unknown(Launch("torchrun", options))
    launch = Launch("torchtune", options)
    return Command("torchtune", {"recipe": texts[0]}, arguments, texts[at + 1], "key=value", launch)


_READERS = {
    "ms_swift": _swift,
    "llama_factory": _llama_factory,
    "axolotl": _axolotl,
    "trl": _trl,
    "torchtune": _torchtune,
}


def _first_file(words: Sequence[Word]) -> tuple[str | None, Sequence[Word]]:
    """The file that the first word names, and the words after it."""
    named = words and words[0].text.endswith(_FILE)
    return (words[0].text, words[1:]) if named else (None, words)


def _pairs(words: Sequence[Word], tool: str) -> list[Argument]:
    """Overrides of a file, key=value, as OmegaConf reads them; torchtune's ~key takes one out."""
    arguments: list[Argument] = []
    for word in words:
        key, equals, value = word.text.partition("=")
        removed = tool == "torchtune" and key.startswith("~")
        if key.startswith("-") or not (equals or removed) or not key.strip("~"):
            raise InputError(f"{brief(word.text)}: after its file {tool} reads KEY=VALUE")
        _refuse_substitution(key, value)
        parsed = None if removed or value == "None" else argument_value(value)
        arguments.append(Argument(key.lstrip("~") if removed else key, parsed, word.start, word.end, removed))
    return arguments


def _override(settings: dict[str, Any], argument: Argument, components: bool) -> None:
    """Set a dotted key inside a file's settings, or take it out.

    Args:
        components: a mapping that builds a component is replaced by naming the component (torchtune/config/_utils.py).
    """
    *parents, name = argument.key.split(".")
    place = settings
    for parent in parents:
        inner = place.get(parent)
        if inner is not None and not isinstance(inner, Mapping):
            raise InputError(f"{argument.key}={brief(argument.value)}: {parent} is {brief(inner)}, which has no keys")
        place[parent] = place = dict(inner or {})
    if argument.removed:
        if name not in place or (isinstance(place[name], Mapping) and "_component_" in place[name]):
            raise InputError(f"~{argument.key}: the file has no such key that can be taken out")
        del place[name]
    elif components and not parents and isinstance(place.get(name), Mapping) and "_component_" in place[name]:
        place[name] = {**place[name], "_component_": argument.value}
    else:
        place[name] = argument.value


def _options(words: Sequence[Word], tool: str, positional: bool = False) -> list[Argument]:
    """Arguments as argparse reads them: --key value …, --key=value, --switch, --no_switch.

    Args:
        positional: words before the first option are an argument without a key.
    """
    groups: list[list[Word]] = []
    for word in words:
        if re.match(r"--[A-Za-z]", word.text):
            groups.append([word])
        elif groups:
            groups[-1].append(word)
        elif positional:
            groups = [[Word("", word.start, word.start), word]]
        else:
            raise InputError(f"{tool} takes no word {brief(word.text)} before its options")
    return [_option(group) for group in groups]


def _option(group: Sequence[Word]) -> Argument:
    key, equals, value = group[0].text.removeprefix("--").partition("=")
    key = key.replace("-", "_")
    texts = [*([value] if equals else []), *_texts(group[1:])]
    _refuse_substitution(f"--{key}", *texts)
    values = [argument_value(text) for text in texts]
    if not texts:
        key, values = key.removeprefix("no_"), [not key.startswith("no_")]
    return Argument(key, values[0] if len(values) == 1 else values, group[0].start, group[-1].end)


def _refuse_substitution(key: str, *values: str) -> None:
    for value in values:
        if "$(" in value or "`" in value:
            raise InputError(f"{key} {brief(value)}: no command is run: write its value")
