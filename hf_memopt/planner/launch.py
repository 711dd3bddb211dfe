"""A plan's profile as the programs that run it take it: settings, launch command and files."""

import logging
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import hub_id
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.estimator.trl_tasks import TRL_TASKS
from hf_memopt.files import folder_for, from_here, shipped, write_folder
from hf_memopt.job.spec import JobSpec
from hf_memopt.presets import preset_by_name
from hf_memopt.presets.accelerate_config import json_text, yaml_text
from hf_memopt.presets.launch_script import as_word, machine_words, scripts
from hf_memopt.presets.shipped_configs import config_name
from hf_memopt.presets.trl_configs import preset_fields
from hf_memopt.redaction import is_secret, without_secrets
from hf_memopt.stack.vocabulary import written

logger = logging.getLogger(__name__)


def as_dict(spec: JobSpec, profile) -> dict[str, Any]:
    """A profile as one JSON object."""
    quantization = profile.preset.quantization() if profile.preset.method == "qlora" else None
    lora = None if profile.preset.method == "full" else {**profile.preset.lora(), **without_secrets(spec.lora)}
    kwargs = {"dtype": profile.preset.dtype, "attn_implementation": spec.attn_implementation or "sdpa"}
    return {
        "profile": profile.name,
        "settings": profile.summary,
        "target_utilization": profile.share,
        "strategy": profile.preset.strategy,
        "training_arguments": training_arguments(spec, profile),
        "memory_arguments": memory_settings(profile),
        "model_kwargs": kwargs | ({"quantization_config": quantization} if quantization else {}),
        "lora": lora,
        "launch": launch_command(spec, profile) if has_recipe(spec) else None,
        "estimate": profile.estimate.to_dict(),
        "relative_speed": round(profile.relative_speed, 3),
        "relative_speed_is": "predicted",
        "tokens_per_second": round(profile.tokens_per_second, 1) if profile.tokens_per_second else None,
    }


def training_arguments(spec: JobSpec, profile) -> dict[str, Any]:
    """All TrainingArguments fields of a profile but secrets: a job without hub_token takes HF_TOKEN."""
    fields = {**profile.preset.settings(), **spec.training}
    if spec.task not in TRL_TASKS:
        return without_secrets(written(fields))
    kind, own = TRL_TASKS[spec.task].config_class, profile.choice.trl.fields()
    fields = {**preset_fields(replace(profile.preset, seq_len=spec.seq_len), kind), **fields, **own}
    if "steps_per_generation" in own:
        fields.pop("generation_batch_size", None)
    return without_secrets(written(fields))


def memory_settings(profile) -> dict[str, Any]:
    """The MemoryArguments fields of a profile that differ from the defaults."""
    memory_args = profile.memory_args
    shares = {name: getattr(memory_args, name) for name in ("memory_profile", "target_memory_utilization")}
    return shares | memory_args.levers()


def launch_command(spec: JobSpec, profile) -> str:
    """The command that starts a profile from the current folder, with the recipes of this installation; where the
    user named no data, once YOUR_DATA.jsonl is replaced."""
    data = _data_arguments(spec, spec.dataset or "YOUR_DATA.jsonl")
    return " ".join([*launcher_command(profile), *recipe_command(spec, profile), *data])


def _data_arguments(spec: JobSpec, source: str) -> list[str]:
    return [
        *("--dataset_name", shlex.quote(source)),
        *(["--ignore_columns", *map(shlex.quote, spec.ignore_columns)] if spec.ignore_columns else []),
        *(["--skip_bad_rows", "true"] if spec.skip_bad_rows else []),
    ]


def accelerate_config(profile, deepspeed_file: str | None = None) -> dict[str, Any]:
    """The accelerate configuration of a profile."""
    config = profile.preset.accelerate_config(deepspeed_file)
    if "fsdp_config" in config:
        config["fsdp_config"]["fsdp_activation_checkpointing"] = bool(profile.choice.checkpointed)
    return config


def launcher_command(profile, no_precision: bool = True) -> list[str]:
    """`accelerate launch`, with the shipped file where one has the same settings.

    Args:
        no_precision: say so where the launcher has none; a trainer of another tool may have its own.
    """
    preset = profile.preset
    file = shipped("accelerate_configs") / config_name(preset)
    if file.is_file() and yaml.safe_load(file.read_text(encoding="utf-8")) == accelerate_config(profile):
        return ["accelerate", "launch", "--config_file", shlex.quote(from_here(file))]
    config = accelerate_config(profile, from_here(file.parent / "deepspeed" / f"{preset.strategy}.json"))
    # accelerate 1.15 takes these from a file or the environment: its words for them are for FSDP2 alone.
    shared = {name.upper(): as_word(value) for name, value in config.get("parallelism_config", {}).items()}
    switches = {"NO": [], "MULTI_GPU": ["--multi_gpu"], "FSDP": ["--use_fsdp"], "DEEPSPEED": ["--use_deepspeed"]}
    precision = config.get("mixed_precision")
    argv = [
        *(f"{name}={value}" for name, value in shared.items()),
        *(["ACCELERATE_USE_PARALLELISM_CONFIG=true"] if shared else []),
        *("accelerate", "launch", "--num_processes", str(config["num_processes"])),
        *switches[config["distributed_type"]],
        *(["--cpu"] if config["use_cpu"] else []),
        *(["--mixed_precision", precision] if precision and (no_precision or precision != "no") else []),
    ]
    for key, value in {**config.get("deepspeed_config", {}), **config.get("fsdp_config", {})}.items():
        argv += [f"--{key}", as_word(value)]
    return [*argv, "--num_machines", str(config["num_machines"]), *machine_words(preset)]


def write_files(spec: JobSpec, profile, directory: str, overwrite: bool = False) -> list[str]:
    """Write training_arguments.json, accelerate.yaml, deepspeed.json (if used), plan.json, launch.sh and, for several
    devices, slurm.sbatch.

    Args:
        overwrite: replace the files of another export.

    Returns:
        The files' paths.

    Raises:
        InputError: the folder cannot be written to, or there is no recipe that they would start.
    """
    if not has_recipe(spec):
        task = spec.task or infer_task(spec.config)
        what = f"task={task}" if spec.is_named else "a configuration object"
        raise InputError(f"{what} has no recipe to export: take the settings of plan --json")
    folder = folder_for(directory)
    if hidden := [name for name in spec.training if is_secret(name)]:
        logger.warning("%s: not written to files; set HF_TOKEN where the job runs, or `hf auth login`", hidden[0])
    files = {
        "training_arguments.json": json_text(training_arguments(spec, profile)),
        "plan.json": json_text(as_dict(spec, profile)),
    }
    if deepspeed := profile.preset.deepspeed_config():
        files["deepspeed.json"] = json_text(deepspeed)
    config = accelerate_config(profile, str(folder / "deepspeed.json"))
    comment = f"{profile.preset.name}, profile {profile.name}: {profile.summary}; written by hf-memopt plan"
    files["accelerate.yaml"] = yaml_text(config, comment)
    argv = recipe_command(spec, profile)
    argv[0] = shlex.quote(str(_recipe_file(spec)))
    if spec.dataset:
        data = Path(spec.dataset).expanduser()
        argv += _data_arguments(spec, str(data.resolve()) if data.exists() else spec.dataset)
    files |= scripts(profile.preset, folder, argv)
    write_folder(folder, files, overwrite)
    return [str(folder / file) for file in sorted(files)]


def recipe_command(spec: JobSpec, profile) -> list[str]:
    """The recipe and its arguments: what differs from the preset that it names."""
    preset = profile.preset
    argv = [
        *(shlex.quote(from_here(_recipe_file(spec))), "--preset", preset.name, "--method", preset.method),
        *("--model_name_or_path", shlex.quote(hub_id(spec.model))),
        *_length_arguments(spec),
        *("--effective_batch_size", str(spec.effective_batch_size)),
    ]
    usual = preset_by_name(preset.name, preset.method, None if preset.engine.alone else preset.strategy)
    given: dict[str, Any] = {
        "per_device_train_batch_size": preset.micro_batch_size,
        "per_device_eval_batch_size": preset.micro_batch_size,
    }
    for name in (usual.training.keys() | preset.training.keys()) - {"activation_checkpointing_kwargs"}:
        if preset.training.get(name) != usual.training.get(name):
            given[name] = preset.training.get(name, False)
    if kwargs := preset.training.get("activation_checkpointing_kwargs"):
        given |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}
    if preset.dtype != usual.dtype:
        given["dtype"] = preset.dtype
    if preset.sequence_parallel > 1:
        given["attn_implementation"] = "sdpa"
    given |= {**without_secrets(spec.training), **profile.choice.trl.fields(), **memory_settings(profile)}
    for name, value in sorted(written(given).items()):
        argv += [f"--{name}", as_word(value)]
    return argv + [
        word for key, value in without_secrets(spec.lora).items() for word in (f"--lora.{key}", as_word(value))
    ]


_RECIPES = {"sft": "sft", "dpo": "dpo", "grpo": "grpo"}  # of TRL's tasks


def has_recipe(spec: JobSpec) -> bool:
    """True if a recipe runs the job: causal language models, videos and three of TRL's tasks, where a command line can
    name the model."""
    if spec.task in TRL_TASKS or not spec.is_named:
        return spec.is_named and spec.task in _RECIPES
    return (spec.task or infer_task(spec.config)) == "causal-lm" or spec.video is not None


def recipe_name(spec: JobSpec) -> str:
    """The recipe that runs the job, where has_recipe()."""
    return "video_sft" if spec.video is not None else _RECIPES.get(spec.task, "pretrain")


def _recipe_file(spec: JobSpec) -> Path:
    """The recipe's file in this installation."""
    return shipped("recipes") / f"{recipe_name(spec)}.py"


def _length_arguments(spec: JobSpec) -> list[str]:
    """The recipe's arguments for the length of samples: tokens of text, or frames and pixels of clips."""
    video = spec.video
    if video is None:
        return ["--max_length", str(spec.seq_len)]
    return [
        *(["--max_frames", str(video.frames)] if video.kind == "video" else []),
        *("--max_pixels_per_frame", str(video.max_pixels_per_frame or "none")),  # left out, the recipe would choose
        *(word for part in ("vision", "projector") for word in (f"--freeze_{part}", as_word(part in spec.frozen))),
    ]
