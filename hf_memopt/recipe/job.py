"""A recipe's job: the arguments resolved against the preset, and its model, tokenizer and data."""

import argparse
import logging
import os
import re
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from hf_memopt.compatibility import check_config_file, launched_config_file, resolve_engine, world_size
from hf_memopt.compatibility.resolve import LAUNCHER, chosen_by_launcher
from hf_memopt.data.bad_rows import BadRows
from hf_memopt.disk import check_writable
from hf_memopt.engines import Engine
from hf_memopt.engines.mesh import mesh_strategy
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.estimator.architectures import read_config
from hf_memopt.estimator.quantized_checkpoints import loading_quantization
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.files import check_links
from hf_memopt.hardware.allocator import configure_allocator
from hf_memopt.hardware.detection import counterpart
from hf_memopt.levers.adapters import add_adapters, by_names, keep_differentiable
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.expert_loading import experts_quantized_on_load
from hf_memopt.levers.streamed_loading import weights_streamed_on_load
from hf_memopt.packages import require
from hf_memopt.presets import Preset, get_preset
from hf_memopt.presets.preset import with_strategy
from hf_memopt.recipe import preflight
from hf_memopt.recipe.auto import Planned, plan_here, plans_here, step_down
from hf_memopt.recipe.defaults import RecipeDefaults, check_data, check_recipe, with_defaults
from hf_memopt.recipe.preflight import quick_cpu_info
from hf_memopt.recipe.recipe_arguments import Parsed, RecipeArguments, parse
from hf_memopt.recipe.resume import keep_finished_run
from hf_memopt.stack.vocabulary import checkpoints_activations
from hf_memopt.video.model_parts import not_quantized, train_parts

logger = logging.getLogger(__name__)

# What the hub, the model code and pickles raise for a name, a configuration or weights that cannot be loaded.
_LOADING = (
    OSError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    EOFError,
    ImportError,
    RuntimeError,
    AssertionError,
    UnpicklingError,
)


@dataclass
class Job:
    """The job that a recipe works on.

    Attributes:
        recipe: its own arguments.
        args: the TrainingArguments.
        memory_args: how memory is watched and kept.
        peft_config: a LoraConfig; None for full fine-tuning.
        quantization: fields of BitsAndBytesConfig that the user set.
        new_folders: output_dir and its parents that were not there before, innermost first.
        argv: the command line without the program's name.
        given: names of what the user set, on the command line or in a file; everything else is a default, which
            follows the data where those have fewer rows.
        planned: the plan's profile; None where a preset was named.
        profile: what a video profile changes of the preset, as text; None where it changes nothing.
        bad_rows: of its data, which are left out.
    """

    recipe: RecipeArguments
    preset: Preset
    args: Any
    memory_args: MemoryArguments
    peft_config: Any
    quantization: dict[str, Any]
    new_folders: list[Path] = field(default_factory=list)
    argv: list[str] = field(default_factory=list)
    given: frozenset[str] = frozenset()
    planned: Planned | None = None
    profile: str | None = None
    bad_rows: BadRows = field(default_factory=BadRows)

    def probed(self, samples_at_once: int) -> None:
        """Start again with a safer profile of the plan where the largest batch did not fit at once.

        Raises:
            StartAgain: it did not fit, and there is a safer profile.
        """
        if self.planned is not None:
            step_down(self.argv, self.planned.safer, samples_at_once, self.args.per_device_train_batch_size)

    @property
    def from_scratch(self) -> bool:
        """True if the weights start random, from an architecture alone."""
        return self.recipe.config_name is not None

    @property
    def model_name(self) -> str:
        """Hub id or path of the weights, or of the architecture when training from scratch."""
        return self.recipe.model_name_or_path or self.recipe.config_name


def start(defaults: RecipeDefaults, argv: list[str] | None = None) -> Job:
    """Parse the arguments and build TrainingArguments; nothing is loaded or written.

    Preset, the recipe's defaults, the file named by --config, the command line: each overrides the one before.

    The preset's environment is set here, before any device is touched, and stays: a recipe is a program, and its
    process is its own. TrainingArguments come first and live on, since from_pretrained asks them (through DeepSpeed's
    weak reference) whether to shard while loading.

    Args:
        argv: the command line without the program's name; by default sys.argv[1:].

    Raises:
        InputError: an argument that cannot be used.
    """
    argv = sys.argv[1:] if argv is None else argv
    _set_named_presets_environment(argv)
    config_class = defaults.config_class() if defaults.config_class else None
    parsed = parse(argv, defaults.description, defaults.arguments, config_class)
    if (file := launched_config_file()) and file.is_file():
        check_config_file(file, processes=world_size())
    own_model = parsed.recipe.model_name_or_path is not None or parsed.recipe.config_name is not None
    recipe, training = with_defaults(parsed, defaults, own_model)
    check_recipe(recipe, training)
    check_data(parsed.recipe, defaults)
    training = keep_finished_run(recipe, training)

    engine = resolve_engine(training)
    require(("datasets", "matplotlib"), "a recipe", "train")
    if engine.package:
        require(engine.package, f"strategy={engine.name}")
    unchanged, preset = _preset_and_changed(parsed, recipe, engine)
    peft_config = preset.peft_config(**parsed.lora)
    preset.apply_environment()
    preset = replace(preset, hardware=counterpart(preset.hardware) or preset.hardware)
    if recipe.effective_batch_size is not None:
        training["effective_batch_size"] = recipe.effective_batch_size
    job = Job(recipe, preset, None, parsed.memory, peft_config, parsed.quantization, argv=argv, given=parsed.given)
    if hasattr(defaults.arguments, "prepare"):
        training |= defaults.arguments.prepare(job, training, parsed, own_model)
    elif own_model and engine.plain and plans_here(recipe.preset):
        job.planned = _plan(job, training, parsed.lora, defaults.task)
        job.preset, job.memory_args = job.planned.preset, job.planned.memory_args
        training |= job.planned.fields
    job.args = job.preset.training_arguments(world_size=world_size(), config_class=config_class, **training)
    # The Trainer pickles its arguments into every checkpoint, hub_token included (transformers 5.23, save_model), and
    # uploads that file too. huggingface_hub reads the token from the environment as well.
    if job.args.hub_token:
        os.environ["HF_TOKEN"], job.args.hub_token = job.args.hub_token, None
    job.profile = _profile_changes(job, parsed, unchanged)
    if job.args.device.type == "cpu" and _needs_deepspeed_now(job):
        with quick_cpu_info(job.args):
            import deepspeed

            deepspeed.init_distributed("gloo", verbose=False)
    output = Path(job.args.output_dir)
    job.new_folders = [folder for folder in (output, *output.parents) if not folder.exists()]
    if job.args.process_index == 0:
        check_writable(job.args.output_dir)
    return job


def _preset_and_changed(parsed: Parsed, recipe: RecipeArguments, engine: Engine) -> tuple[Preset, Preset]:
    """The preset under the job's engine, and the same with what the arguments change of it."""
    strategy = mesh_strategy(recipe.tp_size, recipe.fsdp_size)
    if strategy and not engine.plain:
        where = "was launched" if engine.source == LAUNCHER else f"is asked for by {engine.source}"
        raise InputError(
            f"tp_size and fsdp_size have transformers shard the model, and {engine.label} {where}: use "
            "an accelerate configuration of distributed_type MULTI_GPU"
        )
    preset = get_preset(recipe.preset, recipe.method, strategy)
    if not engine.plain and preset.strategy != engine.strategy:  # by --deepspeed or --fsdp: as if launched so
        preset = with_strategy(preset, engine.strategy)
    # The preset with a profile's batch in the place of its own: a default as that is, which any argument changes.
    names = {"micro_batch_size": "per_device_train_batch_size", "effective_batch_size": "effective_batch_size"}
    changed = {name: parsed.profile[field] for name, field in names.items() if field in parsed.profile}
    changed |= {"dtype": recipe.dtype or preset.dtype, "seq_len": recipe.max_length or preset.seq_len}
    return preset, replace(preset, **changed)


def _profile_changes(job: Job, parsed: Parsed, preset: Preset) -> str | None:
    """The changes of a video profile to the preset where the user made none.

    Args:
        preset: as it was before.
    """
    args = job.args
    usual = {
        "per_device_train_batch_size": preset.micro_batch_size,
        "effective_batch_size": preset.effective_batch_size,
        "activation_checkpointing": bool(preset.training.get("activation_checkpointing")),
        "dtype": preset.dtype,
    }
    micro = args.per_device_train_batch_size
    settings = {
        "per_device_train_batch_size": micro,
        "effective_batch_size": micro * args.gradient_accumulation_steps * job.preset.batches(args.world_size),
        "activation_checkpointing": checkpoints_activations(args),
        "dtype": job.preset.dtype,
    }
    names = [name for name in usual if settings[name] == parsed.profile.get(name) != usual[name]]
    changed = [
        f"{name} {settings[name]} ({'' if number else 'the preset has '}{usual[name]})"
        for number, name in enumerate(name for name in names if name not in parsed.given)
    ]
    name = getattr(job.recipe, "video_profile", None)
    return f"{name}: {', '.join(changed)}" if name and changed else None


def _needs_deepspeed_now(job: Job) -> bool:
    """True if a job on CPUs needs DeepSpeed's communication before its model, which accelerate starts for accelerators
    only (accelerate 1.15, PartialState): Ulysses does, and ZeRO-3 under torchrun, where every process would take
    itself for the only one while it loads."""
    if job.args.deepspeed_plugin is None:
        return False
    return job.preset.sequence_parallel > 1 or (world_size() > 1 and chosen_by_launcher() is None)


def _distributed_config(job: Job):
    """How from_pretrained shards the model over the processes.

    Raises:
        InputError: the sizes do not divide the processes, or the weights are not loaded from files.
    """
    from transformers.distributed import DistributedConfig

    if job.from_scratch:
        raise InputError("tp_size and fsdp_size shard weights while they are loaded: pass model_name_or_path")
    mesh = job.preset.engine.mesh(job.args.world_size)
    return DistributedConfig(**asdict(mesh), fsdp_mixed_precision=job.args.bf16 and mesh.batches > 1)


def _plan(job: Job, training: dict[str, Any], lora: dict[str, Any], task: str | None) -> Planned:
    """The plan for this machine and the user's model.

    Args:
        task: of TRL's that the recipe runs.
    """
    recipe = job.recipe
    config = load_config(job)
    return plan_here(
        config,
        job.preset,
        recipe.profile,
        training,
        seq_len=sequence_length(job, config),
        lora=lora,
        quantization=job.quantization,
        memory_args=job.memory_args,
        task=task,
        attn_implementation=recipe.attn_implementation,
    )


def _set_named_presets_environment(argv: list[str]) -> None:
    """Apply the environment of the preset named on the command line, before parsing imports torch and DeepSpeed."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--preset", nargs="?")
    name = parser.parse_known_args(argv)[0].preset
    if name is None or name == "auto":
        configure_allocator()  # auto looks at the card, which starts CUDA
    else:
        get_preset(name).apply_environment()


def load_config(job: Job):
    """The model's configuration, checked against the length of the samples."""
    with as_input_error(f"model {job.model_name!r}", *_LOADING):
        return read_config(job.model_name, job.recipe.trust_remote_code)


def sequence_length(job: Job, config, usual: int | None = None) -> int:
    """Tokens per sample: max_length, or a default within the model's positions.

    Args:
        usual: by default the preset's.

    Raises:
        InputError: more was asked for than the model has positions.
    """
    usual = usual or job.preset.seq_len
    positions = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    length = job.recipe.max_length
    if length is not None and length < 2:
        raise InputError(f"max_length={length} must be at least 2")
    if length and length > positions:
        raise InputError(
            f"max_length={length} is more than the {positions} positions of {job.model_name}: use at most {positions}"
        )
    if not length and positions < usual < sys.maxsize:
        logger.warning("max_length is %d, the model's positions (the preset has %d)", positions, usual)
    return length or min(usual, positions)


def load_tokenizer(job: Job):
    """The tokenizer, with a padding token: the end-of-text token stands in where there is none."""
    from transformers import AutoTokenizer

    name = job.recipe.tokenizer_name or job.model_name
    if Path(name).is_dir():
        check_links(Path(name))
    with as_input_error(f"tokenizer {name!r}", Exception):  # tokenizers, written in Rust, raises plain Exceptions
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=job.recipe.trust_remote_code)
    if not tokenizer.is_fast:
        raise InputError(
            f"tokenizer {name!r} is a slow one, without the character offsets that locate answers: use a fast one"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # labels are masked explicitly, so its id may mean two things
    return tokenizer


def remove_new_folders(job: Job) -> None:
    """Remove output_dir and the parents that were not there before: the Trainer makes them when it is built."""
    for folder in job.new_folders if job.args.process_index == 0 else ():
        folder.rmdir()


def load_model(job: Job, config, tokenizer, auto=None, frozen: tuple[str, ...] = (), adapters: bool = True):
    """The model as it will be trained: dtype, attention, quantisation, adapters.

    Args:
        auto: transformers' class that makes it; by default AutoModelForCausalLM.
        frozen: parts of a video model that are not trained.
        adapters: add them; a Trainer that takes a peft configuration adds its own.

    Raises:
        InputError: the model cannot be loaded or does not take the tokenizer.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, set_seed

    auto = auto or AutoModelForCausalLM
    if not resolve_engine(job.args).plain:
        preflight.check(
            preflight.describe_launch(
                job.args, config, infer_task(config), job.preset.dtype, adapters=job.peft_config is not None
            )
        )
    set_seed(job.args.seed)  # the Trainer seeds itself only after random weights and adapters were drawn
    kwargs = job.preset.model_kwargs(job.recipe.attn_implementation)
    if job.preset.mesh:
        kwargs["distributed_config"] = _distributed_config(job)
    if job.quantization and "quantization_config" not in kwargs:
        raise InputError("quantization.* applies to method=qlora only")
    if "quantization_config" in kwargs:
        skipped = {"llm_int8_skip_modules": not_quantized(config, auto)} if frozen else {}
        settings = {**job.preset.quantization(), **skipped, **job.quantization}
        kwargs["quantization_config"] = BitsAndBytesConfig(**settings)
    elif not job.from_scratch and (quantization := loading_quantization(config)):
        kwargs["quantization_config"] = quantization
    # ZeRO-3 shards right away
    with as_input_error(f"model {job.model_name!r}", *_LOADING, SafetensorError), quick_cpu_info(job.args):
        if job.from_scratch:
            if len(tokenizer) > config.get_text_config().vocab_size:
                config.get_text_config().vocab_size = len(tokenizer)
            kwargs["dtype"] = getattr(torch, kwargs["dtype"])
            model = auto.from_config(config, trust_remote_code=job.recipe.trust_remote_code, **kwargs)
        else:
            loading = job.memory_args, kwargs.get("quantization_config"), job.peft_config
            with experts_quantized_on_load(*loading), weights_streamed_on_load(*loading):
                model = auto.from_pretrained(job.model_name, trust_remote_code=job.recipe.trust_remote_code, **kwargs)
    if len(tokenizer) > model.config.get_text_config().vocab_size:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens and {job.model_name} embeds "
            f"{model.config.get_text_config().vocab_size}: use the model's own tokenizer"
        )
    if job.args.deepspeed_plugin is not None:
        preflight.check_sharded(model, job.args.deepspeed_plugin.zero_stage)
    with as_input_error("lora", ValueError, TypeError, LookupError, AttributeError, NotImplementedError, re.error):
        if frozen:
            return train_parts(model, job.peft_config, frozen)
        if adapters and job.peft_config is not None:
            return add_adapters(model, job.peft_config)
        job.peft_config = by_names(job.peft_config, model)  # for TRL's trainer, which adds the adapters
        keep_differentiable(model)
        return model
