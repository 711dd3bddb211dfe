"""Whose configuration a file or a command is, and its settings."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_memopt.compatibility.foreign_files import foreign_tool
from hf_memopt.errors import InputError, brief
from hf_memopt.foreign.accelerate import FILES, engine_of_launch, is_launch_option, launch_file
from hf_memopt.foreign.commands import argument_value, parse_commands
from hf_memopt.foreign.table import Table, read_table
from hf_memopt.foreign.translate import Translation, translate
from hf_memopt.yaml_values import read_text, read_yaml

_ENDINGS = (".yaml", ".yml", ".sh")
_PROGRAMS = {"swift", "megatron", "llamafactory-cli", "axolotl", "tune", "trl", "accelerate", "torchrun", "python"}
_TABLES = {
    "axolotl": "axolotl",
    "LLaMA-Factory": "llama_factory",
    "ms-swift": "ms_swift",
    "torchtune": "torchtune",
    "TRL": "trl",
}


@dataclass(frozen=True)
class Source:
    """A configuration of another tool.

    Attributes:
        path: of the file; None of a command.
        text: of the file or command.
        settings: theirs.
        engine: ours, of the accelerate launch that starts it.
    """

    path: Path | None
    text: str
    table: Table
    settings: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_command(self) -> bool:
        """True if it is a command, be it in a script."""
        return self.path is None or self.path.suffix.lower() == ".sh"

    @property
    def label(self) -> str:
        """The file's name, or the command's first words."""
        return str(self.path) if self.path else self.text[:60]

    def translate(self) -> Translation:
        """Its settings in our words."""
        translation = translate(self.table, self.settings, self.path.parent if self.path else Path())
        engine = dict(self.engine)
        precision = engine.pop("mixed_precision", None)
        fields = translation.fields = {**engine, **translation.fields}
        if precision in ("bf16", "fp16") and fields.get("training.bf16") is False and not fields.get("training.fp16"):
            fields[f"training.{precision}"] = True  # a Trainer that names none takes its launcher's
        return translation


def is_source(text: str) -> bool:
    """True if a MODEL of the command line is a file or a command of another tool rather than a model."""
    return _is_command(text) or (Path(text).suffix.lower() in _ENDINGS and not os.path.isdir(text))


def _is_command(text: str) -> bool:
    words = text.split()
    return len(words) > 1 and bool(_PROGRAMS & {Path(word).name for word in words}) and not os.path.exists(text)


def read_source(text: str) -> Source:
    """The settings of a file or a command.

    Raises:
        InputError: it cannot be read, or is no configuration of a training job that is known.
    """
    if _is_command(text):
        return _command(None, text)
    path = Path(text)
    content = read_text(path, text)
    if path.suffix.lower() == ".sh":
        return _command(path, content)
    settings = read_yaml(content, text)
    if not isinstance(settings, Mapping):
        raise InputError(f"{text}: holds no settings, but {brief(settings)}")
    tool = foreign_tool(settings)
    if tool is None:
        known = ", ".join(_TABLES)
        raise InputError(f"{text} is no configuration of a training job of {known}; hf-memopt doctor checks others")
    if tool not in _TABLES:
        raise InputError(f"{text} is a configuration of {tool}, which is not modelled")
    settings = {str(key): value for key, value in settings.items()}
    engine = _engine(_taken_out(settings), path.parent) if tool == "TRL" else {}
    return Source(path, content, read_table(_TABLES[tool]), settings, engine)


def _command(path: Path | None, text: str) -> Source:
    """A command's settings over those of the file that it names."""
    command = parse_commands(text)
    folder = path.parent if path else Path()
    settings: dict[str, Any] = {}
    if command.config:
        settings = _named_file(command.config, folder, command.tool)
    settings = _merged(settings, command.settings)
    settings |= {f"env.{name}": argument_value(value) for name, value in command.environment.items()}
    visible, processes = command.environment.get("CUDA_VISIBLE_DEVICES", ""), settings.get("env.NPROC_PER_NODE", 1)
    more = isinstance(processes, int) and len(visible.split(",")) > processes
    if command.tool == "ms_swift" and not command.launch and more:
        settings["device_map"] = "auto"  # what ms-swift does with more devices than processes
    launch = dict(command.launch)
    if command.tool == "trl":
        launch |= _taken_out(settings)
    return Source(path, text, read_table(command.tool), settings, _engine(launch, folder))


def _taken_out(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of accelerate launch among those of TRL's command, which are taken out."""
    return {key: settings.pop(key) for key in [*settings] if is_launch_option(key)}


def _engine(launch: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ours of the options of accelerate launch."""
    names = [launch.pop(key, None) for key in FILES]
    name = next(filter(None, names), None)
    path = name and (launch_file(str(name)) or _find(str(name), folder))
    return engine_of_launch(path, launch) if launch or path else {}


def _named_file(name: str, folder: Path, tool: str) -> dict[str, Any]:
    settings = read_yaml(read_text(_find(name, folder), name), name)
    if not isinstance(settings, Mapping):
        raise InputError(f"{name}: holds no settings, but {brief(settings)}")
    if _TABLES.get(str(foreign_tool(settings)), tool) != tool:
        raise InputError(f"{name} is a configuration of {foreign_tool(settings)}, and the command another tool's")
    return {str(key): value for key, value in settings.items()}


def _find(name: str, folder: Path) -> Path:
    """A file that a command names: from here, from the script's folder, or from one above it.

    Raises:
        InputError: it is nowhere.
    """
    for place in (Path(), folder, *folder.resolve().parents):
        if (place / name).is_file():
            return place / name
    raise InputError(f"{name}, which the command names, is not here: get it, and ask again")


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over others, those inside a mapping one by one."""
    merged = dict(below)
    for key, value in above.items():
        inner = merged.get(key)
        both = isinstance(inner, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(inner, value) if both else value
    return merged
