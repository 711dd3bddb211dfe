"""A file of another tool as one of the recipes': their arguments, and the command that runs them."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief
from hf_memopt.files import from_here, shipped
from hf_memopt.foreign.translate import EVALUATION, Translation
from hf_memopt.job.spec import JobSpec
from hf_memopt.presets.accelerate_config import json_text, yaml_text
from hf_memopt.presets.launch_script import as_word
from hf_memopt.stack.vocabulary import written

RECIPES = {None: "sft", "causal-lm": "sft", "sft": "sft", "dpo": "dpo", "grpo": "grpo"}
# Engines are started by accelerate.
_ENGINES = ("deepspeed", "fsdp", "fsdp_config")
_RENAMED = {"cpu_offload": "offload_params"}  # keys of fsdp_config -> the launcher's


def recipe_of(spec: JobSpec) -> Path:
    """The recipe that runs a job.

    Raises:
        InputError: there is none.
    """
    if spec.task not in RECIPES:
        raise InputError(f"task={spec.task} has no recipe: hf-memopt estimate predicts it in its own tool")
    return shipped("recipes") / f"{RECIPES[spec.task]}.py"


def recipe_arguments(spec: JobSpec, translation: Translation) -> dict[str, Any]:
    """A job as arguments of its recipe: what memory depends on, and what a run takes beside it.

    Raises:
        InputError: a setting that no recipe has.
    """
    if spec.sizes or (spec.method == "lora" and spec.quantization):
        raise InputError("quantized weights of other than 4 bits are for estimate: no recipe loads them")
    values = {
        "model_name_or_path": str(spec.model),
        "method": spec.method,
        "max_length": spec.seq_len,
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "attn_implementation": spec.attn_implementation,
        "packing": True if spec.packed and RECIPES[spec.task] == "sft" else None,
        **translation.run,
        **{k: v for k, v in spec.training.items() if k not in (*_ENGINES, *EVALUATION)},
    }
    values |= {name: getattr(spec.memory_args, name) for name in sorted(spec.named)}
    values |= {"lora": dict(spec.lora), "quantization": dict(spec.quantization)}
    return written({name: value for name, value in values.items() if value not in (None, {})})


def accelerate_words(spec: JobSpec, deepspeed: Path | None = None) -> list[str]:
    """`accelerate launch` with the engine of a job.

    Args:
        deepspeed: the file of the job's DeepSpeed settings.

    Raises:
        InputError: DeepSpeed's settings without a file for them, or what is not written.
    """
    if spec.sequence_parallel > 1:
        raise InputError(
            f"sequence_parallel={spec.sequence_parallel} is not written: `hf-memopt export --sequence-parallel` "
            "writes a recipe's job, and `hf-memopt estimate` predicts this one"
        )
    words = ["accelerate", "launch", "--num_processes", str(spec.world_size or 1), "--num_machines", "1"]
    if spec.training.get("deepspeed"):
        if deepspeed is None:
            raise InputError("DeepSpeed's settings are a file: name a folder for it, as in hf-memopt migrate FILE DIR")
        return [*words, "--use_deepspeed", "--deepspeed_config_file", shlex.quote(str(deepspeed))]
    if spec.training.get("fsdp"):
        settings = {"fsdp_version": 2, **_options(spec.training.get("fsdp_config") or {})}
        return [*words, "--use_fsdp", *as_words(settings)]
    return [*words, "--multi_gpu"] if (spec.world_size or 1) > 1 else words


def _options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of fsdp_config as options of accelerate launch.

    Raises:
        InputError: a key that it has no option for.
    """
    from accelerate.commands.launch import launch_command_parser

    known = vars(launch_command_parser().parse_args(["script"]))
    names = {key: f"fsdp_{_RENAMED.get(key, key)}" for key in settings}
    if (unknown := next((key for key in settings if names[key] not in known), None)) is not None:
        value = brief(settings[unknown])
        raise InputError(f"fsdp_config.{unknown}={value} is no option of accelerate launch: leave it out")
    return {names[key]: value for key, value in settings.items()}


def as_words(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as a recipe's command line takes them."""
    words: list[str] = []
    for name, value in arguments.items():
        nested = isinstance(value, Mapping) and name in ("lora", "quantization")
        pairs = {f"{name}.{key}": inner for key, inner in value.items()} if nested else {name: value}
        words += [word for key, inner in pairs.items() for word in (f"--{key}", as_word(inner))]
    return words


def migrated_files(spec: JobSpec, translation: Translation, folder: Path) -> dict[str, str]:
    """recipe.yaml, deepspeed.json where the job has one, and launch.sh: name -> text."""
    recipe, deepspeed = recipe_of(spec), spec.training.get("deepspeed")
    comment = f"{translation.table.name}'s settings as {recipe.name}'s, written by hf-memopt migrate"
    files = {"recipe.yaml": yaml_text(recipe_arguments(spec, translation), comment)}
    if deepspeed:
        files["deepspeed.json"] = json_text(deepspeed)
    launcher = accelerate_words(spec, folder / "deepspeed.json")
    config = shlex.quote(str(folder / "recipe.yaml"))
    command = f'exec {" ".join(launcher)} \\\n    {shlex.quote(str(recipe))} --config {config} "$@"\n'
    return files | {"launch.sh": f"#!/bin/sh\n{command}"}


def migrated_command(spec: JobSpec, translation: Translation) -> str:
    """The command that runs a job with a recipe, without files."""
    recipe = shlex.quote(from_here(recipe_of(spec)))
    return " ".join([*accelerate_words(spec), recipe, *as_words(recipe_arguments(spec, translation))])
