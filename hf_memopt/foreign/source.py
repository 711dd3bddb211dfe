"""Whose configuration a file or a command is, and its settings."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_memopt.compatibility.config_files import foreign_tool
from hf_memopt.errors import InputError, brief
from hf_memopt.foreign.accelerate import FILES, engine_of_launch, is_launch_option, launch_file
from hf_memopt.foreign.commands import WORDS, Command, parse_commands
from hf_memopt.foreign.key_table import Table, read_table
from hf_memopt.foreign.launchers import (
    COUNTED,
    ON,
    Launch,
    allocator_setting,
    argument_value,
    count_processes,
    visible_devices,
)
from hf_memopt.foreign.translate import Translation, translate
from hf_memopt.hardware.allocator import SPELLINGS
from hf_memopt.yaml_values import read_text, read_yaml

_ENDINGS = (".yaml", ".yml", ".sh")
_TABLES = {
    "axolotl": "axolotl",
    "LLaMA-Factory": "llama_factory",
    "ms-swift": "ms_swift",
    "torchtune": "torchtune",
    "TRL": "trl",
}
# Where a file sets variables: swift/cli/main.py, trl/scripts/utils.py.
_BLOCKS = {"ms_swift": "ENV", "trl": "env"}


@dataclass(frozen=True)
class Source:
    """A configuration of another tool.

    Attributes:
        path: of the file; None of a command.
        text: of the file or command.
        settings: theirs.
        engine: ours, of what starts it and of its variables.
        command: that was read.
        launch: options of accelerate launch among TRL's, which are none of the settings.
    """

    path: Path | None
    text: str
    table: Table
    settings: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)
    command: Command | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The file's name, or the command's first words."""
        return str(self.path) if self.path else self.text[:60]

    def translate(self) -> Translation:
        """Its settings in our words."""
        folder = (self.path.parent if self.path else Path()) / (self.command.folder if self.command else "")
        translation = translate(self.table, self.settings, folder)
        engine = dict(self.engine)
        precision = engine.pop("mixed_precision", None)
        fields = translation.fields = {**engine, **translation.fields}
        if precision in ("bf16", "fp16") and fields.get("training.bf16") is False and not fields.get("training.fp16"):
            fields[f"training.{precision}"] = True  # a Trainer that names none takes its launcher's
        return translation


def is_source(text: str) -> bool:
    """True if a MODEL of the command line is a file or a command of another tool rather than a model."""
    return is_command(text) or (Path(text).suffix.lower() in _ENDINGS and not os.path.isdir(text))


def is_command(text: str) -> bool:
    """True if a text is a command rather than the name of a file or model."""
    words = re.split(r"[\s;&|()'\"]+", text.strip())
    programs = any(WORDS.fullmatch(word.rpartition("/")[2]) for word in words)
    return len(words) > 1 and programs and not os.path.exists(text)


def read_source(text: str) -> Source:
    """The settings of a file or a command.

    Raises:
        InputError: it cannot be read, or is no configuration of a training job that is known.
    """
    if is_command(text):
        return read_command(None, text)
    path = Path(text)
    content = read_text(path, text)
    return read_command(path, content) if path.suffix.lower() == ".sh" else read_settings(path, content)


def read_settings(path: Path, content: str) -> Source:
    """The settings of a YAML or JSON file.

    Raises:
        InputError: as read_source() raises it.
    """
    settings = _read_mapping(content, str(path))
    tool = foreign_tool(settings)
    if tool is None:
        known = ", ".join(_TABLES)
        raise InputError(f"{path} is no configuration of a training job of {known}; hf-memopt doctor checks others")
    if tool not in _TABLES:
        raise InputError(f"{path} is a configuration of {tool}, which is not modelled")
    options = _taken_out(settings) if tool == "TRL" else {}
    engine = _engine(dict(options), path.parent)
    launch = Launch("accelerate" if tool == "TRL" else tool)
    engine = _surroundings(settings, launch, _variables(settings, _TABLES[tool])) | engine
    return Source(path, content, read_table(_TABLES[tool]), settings, engine, launch=options)


def read_command(path: Path | None, text: str) -> Source:
    """A command's settings over those of the file that it names.

    Args:
        path: of the script that the command is in.

    Raises:
        InputError: as read_source() raises it.
    """
    command = parse_commands(text)
    folder = path.parent if path else Path()
    settings = command.over(_named_file(command, folder) if command.config else {})
    variables, launch = _variables(settings, command.tool), command.launch
    environment = (command.environment | variables) if command.tool == "trl" else (variables | command.environment)
    options = dict(launch.options) if launch.by == "accelerate" else {}
    among = _taken_out(settings) if command.tool == "trl" else {}
    options |= among
    engine = _engine(dict(options), folder, command.folder)
    started = replace(launch, options=options) if launch.by == "accelerate" else launch
    engine = _surroundings(settings, started, environment) | engine
    return Source(path, text, read_table(command.tool), settings, engine, command, among)


def _variables(settings: dict[str, Any], tool: str) -> dict[str, str]:
    """The variables that a file sets, which are taken out."""
    block = settings.pop(_BLOCKS[tool], None) if tool in _BLOCKS else None
    if block is not None and not isinstance(block, Mapping):
        raise InputError(f"{_BLOCKS[tool]}={brief(block)} is no mapping of variables")
    return {str(name): str(value) for name, value in (block or {}).items()}


def _surroundings(settings: dict[str, Any], launch: Launch, environment: Mapping[str, str]) -> dict[str, Any]:
    """Ours of the variables and the launcher, under accelerate's own options; what they do not answer of the variables
    becomes settings."""
    ours: dict[str, Any] = {}
    expandable, others = allocator_setting(environment)
    read = {*SPELLINGS, *COUNTED} if launch.by in ("LLaMA-Factory", "ms-swift") else {*SPELLINGS, *COUNTED[:-2]}
    rest = {name: value for name, value in environment.items() if name not in read}
    rest |= {SPELLINGS[0]: others} if others else {}
    processes, nodes = count_processes(launch, environment)
    if processes:
        ours["world_size"] = processes
    if nodes:
        rest["NNODES"] = nodes
    each = environment.get("NPROC_PER_NODE", "1")
    if launch.by == "ms-swift" and each.isdecimal() and (visible_devices(environment) or 0) > int(each):
        settings["device_map"] = "auto"  # what ms-swift does with more devices than processes
    if launch.by == "LLaMA-Factory" and processes != 1 and environment.get("OPTIM_TORCH", "1").lower() in ON:
        expandable = True if processes or "FORCE_TORCHRUN" in environment else expandable
    if expandable is not None or others:
        ours["expandable"] = bool(expandable)
    settings |= {f"env.{name}": argument_value(value) for name, value in rest.items()}
    return ours


def _taken_out(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of accelerate launch among those of TRL's command, which are taken out."""
    return {key: settings.pop(key) for key in [*settings] if is_launch_option(key)}


def _engine(launch: dict[str, Any], folder: Path, changed: str = "") -> dict[str, Any]:
    """Ours of the options of accelerate launch."""
    name = next(filter(None, [launch.pop(key, None) for key in FILES]), None)
    path = name and (launch_file(str(name)) or _find(str(name), folder, changed))
    return engine_of_launch(path, launch) if launch or path else {}


def _named_file(command: Command, folder: Path) -> dict[str, Any]:
    name = str(command.config)
    settings = _read_mapping(read_text(_find(name, folder, command.folder), name), name)
    if _TABLES.get(str(foreign_tool(settings)), command.tool) != command.tool:
        raise InputError(f"{name} is a configuration of {foreign_tool(settings)}, and the command another tool's")
    return settings


def _read_mapping(content: str, name: str) -> dict[str, Any]:
    """The settings of a file's text."""
    settings = read_yaml(content, name)
    if not isinstance(settings, Mapping):
        raise InputError(f"{name}: holds no settings, but {brief(settings)}")
    return {str(key): value for key, value in settings.items()}


def _find(name: str, folder: Path, changed: str = "") -> Path:
    """A file that a command names: from here, from the script's folder, or from one above it.

    Args:
        changed: the folder into which the script changed, from any of these.

    Raises:
        InputError: it is nowhere.
    """
    for place in (Path(), folder, *folder.resolve().parents):
        if (place / changed / name).is_file():
            return place / changed / name
    raise InputError(f"{name}, which the command names, is not here: get it, and ask again")
