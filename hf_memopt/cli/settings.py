"""What `--set KEY=VALUE` says: fields of Hugging Face's configurations, and the few of this project's."""

from dataclasses import dataclass, field
from typing import Any

from hf_memopt.errors import InputError, brief, choose
from hf_memopt.field_values import fit, hints_of
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.presets import DTYPES, Preset
from hf_memopt.presets.quantization import check_quantization
from hf_memopt.yaml_values import read_yaml

_OWN = {
    "dtype": str,
    "attn_implementation": str | None,
    "task": str | None,
    "kbit_preparation": bool,
    "padded": bool,
    "packed": bool,
}
_VIDEO = {
    "max_frames": int,
    "frame_size": str,
    "max_pixels_per_frame": int | None,
    "answer_tokens": int,
    "freeze_vision": bool,
    "freeze_projector": bool,
}


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """The settings of a command line, by what they belong to.

    Attributes:
        training, lora, quantization: fields of TrainingArguments, LoraConfig and BitsAndBytesConfig.
        memory_args: the MemoryArguments.
        memory_names: those of its fields that were named.
        own: dtype, attn_implementation, task, kbit_preparation, padded and packed.
        video: the clips of a video model.
    """

    training: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    memory_args: MemoryArguments = field(default_factory=MemoryArguments)
    memory_names: frozenset[str] = frozenset()
    own: dict[str, Any] = field(default_factory=dict)
    video: dict[str, Any] = field(default_factory=dict)

    def video_memory_args(self, config) -> MemoryArguments:
        """The MemoryArguments of a video model's job: logits of answers alone, as in the recipe, unless it says more.

        Args:
            config: the model's.
        """
        from hf_memopt.levers.answer_logits import with_few_logits

        return self.memory_args if "logits_to_keep" in self.memory_names else with_few_logits(self.memory_args, config)


def refuse_second_answers(options, settings: JobSettings) -> None:
    """Refuse settings that say otherwise what an option, or another setting, says: one of them would be ignored.

    Args:
        options: estimate's or plan's.
    """
    task, training = settings.own.get("task"), settings.training
    if task and options.task and task != options.task:
        raise InputError(f"--task {options.task} and --set task={task}: leave one of the two out")
    for name in ("deepspeed", "fsdp"):
        if options.strategy and training.get(name) and (name, options.strategy) != ("fsdp", "fsdp2"):
            value = brief(training[name])
            raise InputError(f"--strategy {options.strategy} and --set {name}={value}: leave one of the two out")
    if settings.memory_args.adam_mini and "optim" in training:
        raise InputError(f"adam_mini replaces the optimizer, and optim={training['optim']}: leave one of the two out")


def split_model_sizes(settings: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The settings without those of model.KEY, and these as fields of the model's configuration."""
    sizes = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if equals and key.startswith("model."):
            sizes[key.removeprefix("model.")] = read_yaml(text, f"--set {key}")
    return [setting for setting in settings if not (setting.startswith("model.") and "=" in setting)], sizes


def parse_settings(settings: list[str]) -> JobSettings:
    """KEY=VALUE settings, sorted by what they belong to and checked.

    Raises:
        InputError: one that is not written so, an unknown prefix, or a value that its field does not take.
    """
    groups: dict[str, dict[str, Any]] = {"": {}, "lora": {}, "quantization": {}, "own": {}, "memory": {}, "video": {}}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting}: write it as KEY=VALUE")
        prefix, dot, name = key.partition(".")
        if dot and prefix not in ("lora", "quantization"):
            hint = ", and model. with estimate alone: give plan a config.json" if prefix == "model" else ""
            raise InputError(f"--set {setting}: only lora. and quantization. have keys of their own{hint}")
        known = {"own": _OWN, "memory": MemoryArguments.names(), "video": _VIDEO}
        group = prefix if dot else next((group for group, keys in known.items() if key in keys), "")
        value, place = read_yaml(text, f"--set {key}"), name if dot else key
        if groups[group].setdefault(place, value) != value:
            raise InputError(f"--set {setting}: {key} is {brief(groups[group][place])} already; set it once")
    own = fit(_OWN, groups["own"], "--set ")
    if own.get("dtype") is not None and own["dtype"] not in (*DTYPES, "auto"):
        raise choose("dtype", own["dtype"], (*DTYPES, "auto"))
    return JobSettings(
        training=groups[""],
        lora=groups["lora"],
        quantization=check_quantization(groups["quantization"]),
        memory_args=MemoryArguments(**fit(hints_of(MemoryArguments), groups["memory"], "--set ")),
        memory_names=frozenset(groups["memory"]),
        own=own,
        video=fit(_VIDEO, groups["video"], "--set "),
    )


def quantization_config(preset: Preset, changed: dict[str, Any], video_config=None):
    """The preset's BitsAndBytesConfig with changed fields; None where the method is another and no field asks for
    8-bit weights.

    Args:
        video_config: of a model whose vision tower stays as it is.
    """
    if changed.get("dequantize"):
        if len(changed) > 1:
            raise InputError("quantization.dequantize=true goes with no other quantization.*")
        return changed  # whose configuration it belongs to, the checkpoint says
    changed = {name: value for name, value in changed.items() if name != "dequantize"}
    bits = [name for name in ("load_in_4bit", "load_in_8bit") if changed.get(name)]
    if preset.method != "qlora" and not (preset.method == "lora" and bits):
        if changed:
            raise InputError(
                "quantization.* applies to method=qlora only; load_in_4bit and load_in_8bit to method=lora too, "
                "dequantize to all"
            )
        return None
    from transformers import BitsAndBytesConfig

    settings = changed if changed.get("load_in_8bit") else {**preset.quantization(), **changed}
    if video_config is not None:
        from transformers import AutoModelForImageTextToText

        from hf_memopt.video.model_parts import not_quantized

        settings = {"llm_int8_skip_modules": not_quantized(video_config, AutoModelForImageTextToText), **settings}
    return BitsAndBytesConfig(**settings)
