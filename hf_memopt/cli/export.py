"""`hf-memopt export`: a preset as the files that a person copies, edits and runs."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

from hf_memopt.cli.output import print_json
from hf_memopt.compatibility.mesh import mesh_words
from hf_memopt.compatibility.setup import check
from hf_memopt.errors import InputError, choose
from hf_memopt.files import folder_for, shipped, write_folder
from hf_memopt.presets import Preset, get_preset
from hf_memopt.presets.accelerate_config import inline, yaml_text
from hf_memopt.presets.launch_script import scripts
from hf_memopt.presets.preset import on_machines

RECIPES = ("pretrain", "sft", "video_sft")


def export_preset(
    name,
    directory,
    method,
    strategy,
    precision,
    recipe,
    nvme_path,
    as_json,
    machines=None,
    sequence_parallel=None,
    yaml_only=False,
) -> None:
    """Write the files, all or none; those that are there already are replaced.

    Args:
        yaml_only: accelerate.yaml alone, which holds DeepSpeed's settings itself.
    """
    preset = get_preset(name, method, strategy, precision)
    if machines is not None:
        preset = on_machines(preset, machines)
    if sequence_parallel is not None:
        preset = _sharing_tokens(preset, sequence_parallel)
    check(preset.setup())
    if recipe not in RECIPES:
        raise choose("recipe", recipe, RECIPES)
    folder = folder_for(directory)
    files = _yaml_alone(preset, nvme_path) if yaml_only else _contents(preset, folder, recipe, name, nvme_path)
    write_folder(folder, files)
    if as_json:
        print_json({"directory": str(folder), "files": sorted(files)})
    elif yaml_only:
        config = shlex.quote(str(folder / "accelerate.yaml"))
        print(f"wrote accelerate.yaml to {folder}; use it with: accelerate launch --config_file {config} SCRIPT.py")
    else:
        start = "sbatch" if preset.machines > 1 else "sh"
        script = shlex.quote(str(folder / ("slurm.sbatch" if preset.machines > 1 else "launch.sh")))
        print(f"wrote {', '.join(sorted(files))} to {folder}; start with: {start} {script}")


def _sharing_tokens(preset: Preset, devices: int) -> Preset:
    """The preset with so many devices to a batch's tokens.

    Raises:
        InputError: its engine, or its number of devices, cannot do that.
    """
    if not preset.strategy.startswith("zero"):
        raise InputError(
            f"sequence_parallel={devices} is DeepSpeed's, and the strategy is {preset.strategy}: "
            "use strategy zero1, zero2 or zero3"
        )
    preset = replace(preset, sequence_parallel=devices)
    preset.batches(preset.processes)
    return preset


def _contents(preset: Preset, folder: Path, recipe: str, name: str, nvme_path: str | None) -> dict[str, str]:
    """File name -> text."""
    settings = preset.settings()
    if preset.machines > 1 or preset.sequence_parallel > 1:  # it follows from the effective batch there
        del settings["gradient_accumulation_steps"]
    files = {"training_arguments.json": _json(settings)}
    deepspeed = _with_nvme_path(preset, nvme_path)
    if deepspeed:
        files["deepspeed.json"] = _json(deepspeed)
    # accelerate resolves this path against the working directory, so it has to be absolute.
    files["accelerate.yaml"] = yaml_text(preset.accelerate_config(str(folder / "deepspeed.json")), _comment(preset))
    return files | scripts(preset, folder, _recipe_words(preset, folder, recipe, name))


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


def _recipe_words(preset: Preset, folder: Path, recipe: str, name: str) -> list[str]:
    script = shipped("recipes") / f"{recipe}.py"
    return [
        shlex.quote(str(script)),
        "--preset",
        name,
        "--method",
        preset.method,
        "--effective_batch_size",
        str(preset.effective_batch_size),
        "--config",
        shlex.quote(str(folder / "training_arguments.json")),
        *mesh_words(preset.strategy),
        *(["--attn_implementation", "sdpa"] if preset.sequence_parallel > 1 else []),
    ]


def _json(value: dict) -> str:
    return json.dumps(value, indent=2) + "\n"
