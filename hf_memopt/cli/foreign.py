"""MODEL as another tool's configuration: the job of a file or command, and what of it was not taken as it is."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hf_memopt.cli.settings import command_spec
from hf_memopt.compatibility.config_files import Examined, Fault, Lines, foreign_tool
from hf_memopt.errors import InputError, as_input_error, listed
from hf_memopt.files import folder_for, write_folder
from hf_memopt.foreign.edits import changed_keys, diff, edit, launched, planned
from hf_memopt.foreign.migrate import migrated_command, migrated_files
from hf_memopt.foreign.source import Source, is_command, is_source, read_source
from hf_memopt.foreign.translate import Translation
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.planner.devices import split_count
from hf_memopt.terminal import say
from hf_memopt.yaml_values import read_yaml_file

_SHOWN = 12  # keys of a list


def read_job(
    model: str, usual_method: str, settings: list[str] | None, **options: Any
) -> tuple[JobSpec, Source | None]:
    """The job of a command line, whose MODEL may be another tool's file or command: options and --set go over it.

    Args:
        usual_method: where neither the option nor the file names one.

    Returns:
        The job, and the file or command that it was read from.

    Raises:
        InputError: as command_spec() and Translation.check() raise it.
    """
    chosen = options.pop("method", None)
    asked = command_spec(settings, model=model, method=chosen or usual_method, **options)
    if not is_source(model):
        return asked, None
    source = read_source(model)
    translation = source.translate()
    count = split_count(asked.hardware)[1] if asked.hardware else 1
    with as_input_error(source.label, InputError):
        translation.check()
        devices = asked.world_size or (count if count > 1 else None)
        length = options["seq_len"] if isinstance(options.get("seq_len"), int) else None  # else the longest that fits
        spec = _over(translation.spec(length, devices), asked, options)
        tool = replace(
            spec.tool,
            reads=lambda ours: _over(planned(source, ours), asked, options),
            keys=lambda ours: changed_keys(source, ours),
        )
    spec = replace(spec, tool=tool)
    if chosen:
        spec = replace(spec, method=chosen, lora=spec.lora if chosen != "full" else {})
    devices = spec.world_size or count
    if devices > 1 and source.table.one_device:
        raise InputError(f"{source.label}: {devices} devices: {source.table.one_device}")
    if spec.seq_len is None and translation.length and "seq_len" in options:
        raise InputError(f"{source.label}: {translation.length}: pass --seq-len")
    announce(translation)
    return spec, source


def run_migrate(file: str, folder: str | None, overwrite: bool, settings: list[str] | None) -> None:
    """Print the recipe command of a file, or write it into a folder.

    Raises:
        InputError: a file that cannot be read, or whose job no recipe runs.
    """
    if not is_source(file):
        raise InputError(f"{file} is no YAML or command of another training tool")
    spec, source = read_job(file, "full", settings)
    translation = source.translate()
    if spec.seq_len is None and translation.length:
        raise InputError(f"{source.label}: {translation.length}: set it there")
    if translation.unwritten:
        unwritten = ", ".join(sorted(translation.unwritten))
        say(f"note: no recipe takes these as they are, set what you need of them yourself: {unwritten}", sys.stderr)
    if folder is None:
        return say(migrated_command(spec, translation))
    place = folder_for(folder)
    files = migrated_files(spec, translation, place)
    write_folder(place, files, overwrite)
    return say(f"wrote {', '.join(str(place / name) for name in sorted(files))}: sh {place / 'launch.sh'}")


def plan_edits(source: Source, profile) -> tuple[dict[str, Any], str, str | None]:
    """Their keys that a profile changes, the diff of the file or command where one says that and no more, and the
    launcher's words where these say how several devices train; a command's diff has them."""
    from hf_memopt.planner.launch import launcher_command

    keys = changed_keys(source, profile.choice.settings)
    launcher = None
    if source.table.launched and profile.preset.processes > 1:  # the file says who checkpoints, not FSDP's
        unchecked = replace(profile, choice=replace(profile.choice, checkpointed=0.0))
        launcher = " ".join(launcher_command(unchecked, no_precision=False))
    text = edit(source, keys)
    if text and launcher and source.command:
        text = launched(text, launcher)
    return keys, diff(source, text), launcher


def _over(spec: JobSpec, asked: JobSpec, options: Mapping[str, Any]) -> JobSpec:
    """A file's job under what the command line says."""
    changed = {name: value for name, value in options.items() if value is not None}
    if changed.get("sequence_parallel") == 1:  # the option's default
        del changed["sequence_parallel"]
    for name in ("training", "lora", "quantization", "sizes"):
        changed[name] = {**getattr(spec, name), **getattr(asked, name)}
    for name in ("dtype", "attn_implementation", "task", "kbit_preparation", "padded", "packed", "clips"):
        changed[name] = getattr(asked, name) or getattr(spec, name)
    memory = {name: getattr(spec.memory_args, name) for name in spec.named}
    memory |= {name: getattr(asked.memory_args, name) for name in asked.named}
    return replace(spec, **changed, memory_args=MemoryArguments(**memory), named=spec.named | asked.named)


def announce(translation: Translation) -> None:
    """Say on stderr what of a file was not taken as it is."""
    table = translation.table
    say(f"note: read as {table.name} {table.version}: {len(translation.translated)} settings translated", sys.stderr)
    if translation.neutral:
        say(f"note: without effect on memory: {listed(sorted(translation.neutral), _SHOWN)}", sys.stderr)
    for text, keys in _by_text(translation).items():
        say(f"note: approximated: {listed(sorted(keys), _SHOWN)}: {text}", sys.stderr)


def _by_text(translation: Translation) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for remark in translation.approximated:
        texts.setdefault(remark.text, []).append(remark.key)
    return texts


def examine_foreign(file: str) -> Examined | None:
    """What is found in another tool's file or command; None where it is none."""
    if not is_source(file):
        return None
    if Path(file).suffix.lower() in (".yaml", ".yml") and not is_command(file):
        try:
            content = read_yaml_file(file, file)
        except InputError:
            return None  # its own check says why
        if not isinstance(content, Mapping) or foreign_tool(content) is None:
            return None
    try:
        source = read_source(file)
        translation, lines = source.translate(), Lines(source.text if source.path else "")
        faults = [Fault(file, lines.line_of(tuple(key.split("."))), text) for key, text in translation.faults()]
        notes = [
            f"approximated: {listed(sorted(keys), _SHOWN)}: {text}" for text, keys in _by_text(translation).items()
        ]
        if translation.neutral:
            notes.append(f"without effect on memory: {listed(sorted(translation.neutral), _SHOWN)}")
        return Examined(source.table.name, faults, notes)
    except InputError as error:
        return Examined("another tool's", [Fault(file, None, str(error).removeprefix(f"{file}: "))], [])
