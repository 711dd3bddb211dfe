"""The recipes' arguments, from the command line over a file; only those that the user set."""

import argparse
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hf_memopt.compatibility.config_files import foreign_tool
from hf_memopt.data.sources import USUAL_HELD_OUT
from hf_memopt.errors import InputError, as_input_error, brief, choose, one_line, respell
from hf_memopt.field_values import fit, hints_of, json_value, read_field
from hf_memopt.hub_names import hub_name
from hf_memopt.levers.arguments import PLAN_PROFILES, MemoryArguments
from hf_memopt.presets import DTYPES, METHODS
from hf_memopt.presets.quantization_fields import check_4bit, check_quantization
from hf_memopt.stack.versions import EVERY_N_LAYERS, OFFLOADED_INPUTS, has
from hf_memopt.stack.vocabulary import RENAMED, argument_hints, newest
from hf_memopt.yaml_values import read_yaml, read_yaml_file

_NESTED = ("lora", "quantization")
BATCH = ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass
class RecipeArguments:
    """Arguments that TrainingArguments has no word for: the preset, the model, the data."""

    preset: str = field(
        default="auto",
        metadata={"help": "Hardware preset (hf-memopt presets), or auto: a plan for the memory that is free."},
    )
    method: str = field(default="full", metadata={"help": "full, lora or qlora."})
    profile: str = field(
        default="balanced",
        metadata={
            "help": "Profile of --preset auto, by how much memory it fills: safe, balanced, aggressive or maximum.",
            "aliases": ["--rung"],  # its name in 0.1
        },
    )
    config: str | None = field(default=None, metadata={"help": "YAML or JSON file with any of these arguments."})
    effective_batch_size: int | None = field(
        default=None, metadata={"help": "Samples per optimizer step over all devices. Default: the preset's."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Hub id or folder of the model. Default: a small built-in one."}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "Train from scratch: hub id, folder or config.json of the architecture."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: the model's own."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    dtype: str | None = field(default=None, metadata={"help": "Dtype of the loaded weights. Default: the preset's."})
    attn_implementation: str | None = field(
        default=None, metadata={"help": "eager, sdpa, flash_attention_2, … Default: the fastest that works here."}
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Hub name, file (jsonl json csv parquet txt) or folder. The built-in model has data of its own."
        },
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set."})
    dataset_train_split: str = field(default="train", metadata={"help": "Split to train on."})
    dataset_test_split: str | None = field(
        default=None, metadata={"help": "Split to evaluate on. Default: rows held out of the training split."}
    )
    ignore_columns: list[str] | None = field(
        default=None, metadata={"help": "Columns of the data to ignore, which would be refused otherwise."}
    )
    skip_bad_rows: bool = field(
        default=False,
        metadata={"help": "Leave out rows that cannot be trained on, and say how many. Default: they end the run."},
    )
    held_out: float = field(
        default=USUAL_HELD_OUT,
        metadata={"help": "Rows held out for evaluation: a share below 1, or a number. 0: none."},
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens per sample. Default: the preset's, within the model's positions."}
    )
    tp_size: int | None = field(
        default=None, metadata={"help": "Devices that split every layer (tensor parallelism)."}
    )
    fsdp_size: int | None = field(
        default=None, metadata={"help": "Devices that shard the weights; further ones hold replicas (HSDP)."}
    )
    streaming: bool = field(default=False, metadata={"help": "Read data while training (needs --max_steps)."})
    shuffle_buffer_size: int = field(default=10_000, metadata={"help": "Rows of a stream's shuffle buffer."})
    samples: int = field(default=3, metadata={"help": "Generated samples to print at the end."})
    overwrite: bool = field(
        default=False, metadata={"help": "Replace a finished run in output_dir, with its checkpoints."}
    )
    dry_run: bool = field(default=False, metadata={"help": "Stop before training; write nothing."})


@dataclass(frozen=True)
class Parsed:
    """The recipe's own arguments, MemoryArguments, the TrainingArguments fields that were given, and nested ones.

    Attributes:
        given: names on the command line or in the file; the others are a profile's.
        profile: what a profile sets, under what was given; its batch stands in the preset's place.
    """

    recipe: RecipeArguments
    memory: MemoryArguments
    training: dict[str, Any]
    lora: dict[str, Any]
    quantization: dict[str, Any]
    given: frozenset[str] = frozenset()
    profile: dict[str, Any] = field(default_factory=dict)


def parse(
    argv: list[str] | None = None,
    description: str = "",
    own: type = RecipeArguments,
    config_class: type | None = None,
) -> Parsed:
    """Read the command line and the file named by --config.

    The command line goes over the file. A default of TrainingArguments never counts as given. `--lora.KEY` and
    `--quantization.KEY` (in a file: a mapping under `lora` or `quantization`) set fields of LoraConfig and
    BitsAndBytesConfig.

    Args:
        argv: without the program's name; by default sys.argv[1:].
        description: shown by --help.
        own: RecipeArguments, or a recipe's subclass of it; its `profile_of(values)` says what a profile stands for.
        config_class: by default TrainingArguments; a field of the same name in `own` goes before its.

    Raises:
        InputError: an unknown or badly typed argument, an unreadable file.
    """
    from transformers import TrainingArguments

    kind = config_class or TrainingArguments
    parser = _parser(description, own, kind)
    argv, nested = _split_nested(sys.argv[1:] if argv is None else argv)
    actions = {action.dest: action for action in parser._actions}
    with as_input_error("arguments", ValueError, TypeError, KeyError, argparse.ArgumentError):
        given, unknown = parser.parse_known_args(_spread(argv, actions))
    if unknown:
        raise choose("argument", unknown[0].lstrip("-").split("=")[0], actions.keys() - {"help"})
    hints = {**argument_hints(kind), **hints_of(MemoryArguments), **hints_of(own)}
    given = fit(hints, {name: None if value == [None] else value for name, value in vars(given).items()})
    if "config" in given:
        from_file = _read(given["config"], actions, hints)
        nested = {name: {**from_file.pop(name, {}), **nested[name]} for name in _NESTED}
        given = {**_without_third(from_file, given), **given}
    given = _as_known(newest(given))
    named = frozenset(given)
    profile = own.profile_of(given) if hasattr(own, "profile_of") else {}
    given = {**{name: value for name, value in profile.items() if name not in BATCH}, **given}
    training_fields = argument_hints(kind).keys() - hints_of(own).keys()
    memory = {name: value for name, value in given.items() if name in MemoryArguments.names()}
    other = {name: value for name, value in given.items() if name not in training_fields | memory.keys()}
    training = {name: value for name, value in given.items() if name in training_fields}
    if given_kwargs := training.get("activation_checkpointing_kwargs"):
        training["activation_checkpointing_kwargs"] = _checkpointing_kwargs(given_kwargs)
    quantization = check_4bit(check_quantization(nested.pop("quantization")))
    return Parsed(
        own(**other),
        MemoryArguments(**memory),
        training,
        **nested,
        quantization=quantization,
        given=named,
        profile=profile,
    )


def _as_known(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with names that people write in several ways as the libraries take them."""
    from hf_memopt.estimator.architectures import hub_id, read_name

    known = {"method": METHODS, "profile": PLAN_PROFILES, "dtype": DTYPES}
    spelled = {name: respell(name, given[name], names) for name, names in known.items() if given.get(name)}
    models = {
        name: hub_id(read_name(given[name])) for name in ("model_name_or_path", "config_name") if given.get(name)
    }
    if given.get("dataset_name"):
        spelled["dataset_name"] = hub_name(given["dataset_name"])
    return {**given, **spelled, **models}


def _without_third(from_file: dict[str, Any], line: dict[str, Any]) -> dict[str, Any]:
    """The file without batch settings that follow from the others: two of the three are enough, the line's first."""
    if not any(name in line for name in BATCH):
        return from_file
    kept = [name for name in BATCH if name in line]
    kept += [name for name in BATCH if name in from_file and name not in line][: max(0, 2 - len(kept))]
    return {name: value for name, value in from_file.items() if name not in BATCH or name in kept}


def _parser(description: str, own: type, kind: type) -> argparse.ArgumentParser:
    from transformers import HfArgumentParser

    class Parser(HfArgumentParser):
        """transformers' parser, with errors of one line."""

        def error(self, message: str):
            raise InputError(message)

    parser = Parser(
        [own, MemoryArguments, kind],
        conflict_handler="resolve",  # TRL's classes have max_length and trust_remote_code, too
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="Also --lora.KEY VALUE (LoraConfig) and --quantization.KEY VALUE (BitsAndBytesConfig).",
    )
    for row in RENAMED:  # the newest name works as well, where transformers does not have it yet
        if (action := parser._option_string_actions.get(f"--{row.old}")) and row.kind is None:
            parser._option_string_actions.setdefault(f"--{row.new}", action)
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # so that only what was given appears
        action.required = False
        action.nargs = "*" if action.nargs == "+" else action.nargs
        if action.type in (int, float):
            action.type = _reader(action.dest, action.type)
        if action.type is not None:  # fit() judges whether an argument takes nothing
            own_word = action.dest in getattr(own, "OR_NONE", ())
            action.type = _or_none(action.type, ("null", "none") if own_word else ("null",))
    return parser


def _reader(name: str, kind: type) -> Callable[[str], int | float]:
    """A number as people write it for an argument: 2k, 1e-4, 2,048."""

    def read(text: str) -> int | float:
        if (number := read_field(name, kind, text)) is None:
            raise ValueError(text)
        return number

    read.__name__ = kind.__name__
    return read


def _or_none(kind, words: tuple[str, ...]):
    def read(text: str):
        return None if text.lower() in words else kind(text)

    read.__name__ = kind.__name__ + (" or none" if "none" in words else "")
    return read


def _split_nested(argv: list[str]) -> tuple[list[str], dict[str, dict]]:
    """Take `--lora.r 8` and `--lora.r=8` out of the arguments."""
    rest: list[str] = []
    nested: dict[str, dict] = {name: {} for name in _NESTED}
    words = iter(argv)
    for word in words:
        section, _, key = word.removeprefix("--").partition(".")
        if not word.startswith("--") or section not in _NESTED:
            rest.append(word)
            continue
        key, equals, value = key.partition("=")
        if not equals and (value := next(words, None)) is None:
            raise InputError(f"argument --{section}.{key}: a value is missing")
        nested[section][key] = read_yaml(value, f"argument --{section}.{key}")
    return rest, nested


def _spread(argv: list[str], actions: dict[str, argparse.Action]) -> list[str]:
    """The command line with a list that is written as JSON in the words that argparse takes for it."""
    words = []
    for option, word in pairwise(["", *argv]):
        action = actions.get(option.removeprefix("--")) if option.startswith("--") else None
        content = json_value(word) if action is not None and action.nargs == "*" else word
        words += map(str, content) if isinstance(content, list) else [word]
    return words


def _read(path: str, actions: dict[str, argparse.Action], hints: dict[str, Any]) -> dict[str, Any]:
    """The file's arguments, each converted as the command line would convert it."""
    where = f"--config {path}"
    content = read_yaml_file(path, where)
    if not isinstance(content, dict):
        raise InputError(f"{where}: holds no `argument: value` lines")
    values = {}
    for name, value in content.items():
        if name in _NESTED:
            if not isinstance(value, dict):
                raise InputError(f"{where}: {name} must be a mapping, not {brief(value)}")
            values[name] = value
        elif name not in actions or name in ("help", "config"):
            if (tool := foreign_tool(content)) not in (None, "TRL"):  # TRL's words are the recipes' own
                raise InputError(f"{where}: is {tool}'s: hf-memopt estimate {path} predicts it, migrate translates it")
            raise choose(f"argument in {path}", str(name), [*actions.keys() - {"help", "config"}, *_NESTED])
        else:
            values[name] = _converted(path, name, value, actions[name])
    return fit(hints, values, f"{where}: ")


def _converted(path: str, name: str, value: Any, action: argparse.Action) -> Any:
    if action.choices and value is False and "no" in action.choices:
        value = "no"  # which YAML reads as false
    # YAML reads 1e-4 as a string, and some fields want a list.
    if isinstance(value, str) and (action.choices or action.type not in (None, str)):
        try:
            value = action.type(value)
        except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
            raise InputError(
                f"--config {path}: {name}: {brief(value)} is not valid ({one_line(error)[:200]})"
            ) from None
    return value


def _checkpointing_kwargs(value: Any) -> dict:
    """A mapping with only the keys that transformers and torch read; others would surface as a traceback, late."""
    from torch.utils.checkpoint import checkpoint

    name = "activation_checkpointing_kwargs"
    if isinstance(value, str):
        value = read_yaml(value, name)
    if not isinstance(value, dict):
        raise InputError(f"{name} must be a mapping, not {brief(value)}")
    read_by_torch = set(inspect.signature(checkpoint).parameters) - {"function", "args", "kwargs"}
    versions = {"every_n_layers": EVERY_N_LAYERS, "offload": OFFLOADED_INPUTS}
    known = read_by_torch | {key for key, since in versions.items() if has("transformers", since)}
    for key in value.keys() - known:
        raise choose(f"key of {name}", str(key), known)
    return value
