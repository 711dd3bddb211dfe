"""`hf-memopt export`: a preset as the files that a person copies, edits and runs."""

import shlex
from dataclasses import dataclass, field, replace
from pathlib import Path

from hf_memopt.cli.output import print_json
from hf_memopt.compatibility.setup import check
from hf_memopt.contributed import load_contributed
from hf_memopt.engines.mesh import mesh_words
from hf_memopt.errors import InputError, accepted, choose, respell
from hf_memopt.field_values import hints_of
from hf_memopt.files import folder_for, from_here, shipped, write_folder
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.other_names import meant_by, plain_word
from hf_memopt.packages import missing_for
from hf_memopt.presets import Preset, preset_by_name
from hf_memopt.presets.accelerate_config import inline, json_text, yaml_text
from hf_memopt.presets.launch_script import scripts
from hf_memopt.presets.preset import on_machines
from hf_memopt.recipe.recipe_arguments import RecipeArguments
from hf_memopt.stack.vocabulary import written

RECIPES = ("pretrain", "sft", "video_sft", "dpo", "grpo")


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The preset to write, and how.

    Attributes:
        recipe: the one that launch.sh starts.
        nvme_path: folder on the NVMe disk, for zero3_offload_nvme.
        machines: each with the preset's devices; also writes slurm.sbatch.
        sequence_parallel: devices that split each sequence.
        yaml_only: accelerate.yaml alone, which holds DeepSpeed's settings itself.
        overwrite: replace the files of another export.
        target: slurm | skypilot | hf-jobs | kubernetes: the files of a job there; None for this machine's.
        arguments: more arguments of the recipe.
    """

    preset: str
    directory: str
    method: str = "full"
    strategy: str | None = None
    precision: str | None = None
    recipe: str = "sft"
    nvme_path: str | None = None
    machines: int | None = None
    sequence_parallel: int = 1
    yaml_only: bool = False
    overwrite: bool = False
    target: str | None = None
    arguments: list[str] = field(default_factory=list)


def export_preset(options: ExportOptions, as_json: bool) -> None:
    """Write the files, all or none; those of another export are replaced only with overwrite."""
    targets = {} if options.target is None else load_contributed("export_targets")
    options = replace(
        options,
        recipe=accepted("recipe", options.recipe, RECIPES),
        target=options.target and respell("target", options.target, ["slurm", *targets]),
    )
    preset = preset_by_name(options.preset, options.method, options.strategy, options.precision)
    if options.machines is not None:
        preset = on_machines(preset, options.machines)
    if options.sequence_parallel > 1:
        preset = _split_sequences(preset, options.sequence_parallel)
    check(preset.setup())
    # Refuse other tools' words among the recipe's arguments, which would fail where the job starts. The recipe itself
    # checks all others: its parser needs transformers and TRL.
    known = {*hints_of(RecipeArguments), *MemoryArguments.names()}
    for word in (word.partition("=")[0] for word in options.arguments if word.startswith("--")):
        meant = meant_by("argument", word, known)
        if meant and plain_word(meant) != plain_word(word):
            raise InputError(f"{word} is no argument of a recipe. Did you mean {meant}?")
    if options.target not in (None, "slurm", *targets):
        raise choose("target", options.target, ["slurm", *targets])
    if options.target and options.yaml_only:
        raise InputError(f"target={options.target} and yaml_only exclude each other: leave one out")
    folder = folder_for(options.directory)
    start = "sbatch {}/slurm.sbatch" if options.target or preset.machines > 1 else "sh {}/launch.sh"  # {}: the folder
    if options.target in targets:
        config_files = {
            "training_arguments.json": json_text(_settings(preset)),
            **_yaml_alone(preset, options.nvme_path),
        }
        recipe = [options.recipe, *_recipe_arguments(preset, options)]
        files, start = targets[options.target](preset, options.target, recipe, config_files)
    elif options.yaml_only:
        files = _yaml_alone(preset, options.nvme_path)
        start = "accelerate launch --config_file {}/accelerate.yaml SCRIPT.py"
    else:
        files = _contents(preset, folder, options)
    write_folder(folder, files, options.overwrite)
    if as_json:
        print_json({"directory": str(folder), "files": sorted(files)})
        return
    start = start.format(shlex.quote(from_here(folder)))
    print(f"wrote {', '.join(sorted(files))} to {folder}; start with:\n  {start}")
    started = not (options.target or options.yaml_only)  # by what was written here
    if started and (missing := missing_for(options.recipe, preset.strategy)):
        print(f"note: {missing}")


def _split_sequences(preset: Preset, devices: int) -> Preset:
    """The preset with so many devices to each sequence.

    Raises:
        InputError: its engine, or its number of devices, cannot do that.
    """
    if not preset.deepspeed_config():
        raise InputError(
            f"sequence_parallel={devices} is DeepSpeed's, and the strategy is {preset.strategy}: "
            "use strategy zero1, zero2 or zero3"
        )
    preset = replace(preset, sequence_parallel=devices)
    preset.batches(preset.processes)
    return preset


def _contents(preset: Preset, folder: Path, options: ExportOptions) -> dict[str, str]:
    """File name -> text."""
    files = {"training_arguments.json": json_text(_settings(preset))}
    if deepspeed := _with_nvme_path(preset, options.nvme_path):
        files["deepspeed.json"] = json_text(deepspeed)
    # accelerate resolves this path against the working directory, so it has to be absolute.
    files["accelerate.yaml"] = yaml_text(preset.accelerate_config(str(folder / "deepspeed.json")), _comment(preset))
    script = shipped("recipes") / f"{options.recipe}.py"
    config = ["--config", shlex.quote(str(folder / "training_arguments.json"))]
    command = [shlex.quote(str(script)), *config, *map(shlex.quote, _recipe_arguments(preset, options))]
    return files | scripts(preset, folder, command, batch=options.target == "slurm")


def _settings(preset: Preset) -> dict:
    settings = written(preset.settings())
    if preset.machines > 1 or preset.sequence_parallel > 1:  # follows from the effective batch when the job starts
        del settings["gradient_accumulation_steps"]
    return settings


def _yaml_alone(preset: Preset, nvme_path: str | None) -> dict[str, str]:
    """accelerate.yaml alone: file name -> text."""
    deepspeed = _with_nvme_path(preset, nvme_path)
    config = preset.accelerate_config(inline(deepspeed) if deepspeed else None)
    return {"accelerate.yaml": yaml_text(config, _comment(preset))}


def _comment(preset: Preset) -> str:
    return f"{preset.name}, method {preset.method}, strategy {preset.strategy}; written by hf-memopt export"


def _with_nvme_path(preset: Preset, nvme_path: str | None) -> dict | None:
    config = preset.deepspeed_config()
    if nvme_path and not preset.strategy.endswith("_nvme"):
        raise InputError(f"nvme_path={nvme_path} needs strategy=zero3_offload_nvme, not {preset.strategy}")
    if nvme_path:
        path = Path(nvme_path).expanduser().resolve()
        if not path.is_dir():
            raise InputError(f"nvme_path={nvme_path} is not a folder")
        for block in ("offload_optimizer", "offload_param"):
            config["zero_optimization"][block]["nvme_path"] = str(path)
    return config


def _recipe_arguments(preset: Preset, options: ExportOptions) -> list[str]:
    """The recipe's arguments beside its configuration."""
    return [
        *("--preset", options.preset, "--method", preset.method),
        *("--effective_batch_size", str(preset.effective_batch_size)),
        *mesh_words(preset.strategy),
        *(["--attn_implementation", "sdpa"] if preset.sequence_parallel > 1 else []),
        *options.arguments,
    ]
