"""The frames, frame size and micro-batch of a run that were not asked for: what is predicted to fit its device.

The command line and the file override a named profile, which overrides what is chosen here. Where nothing can be
chosen, the balanced profile is used, and the first line says so.
"""

import functools
import json
import logging
import math
import os
import sys
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_memopt.compatibility.resolve import launched_strategy, world_size
from hf_memopt.errors import InputError
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.job import Job as EstimatedJob
from hf_memopt.files import user_path, write_json
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.levers.few_logits import with_few_logits
from hf_memopt.planner.samples.video_tiers import (
    SHARE,
    FixedLimits,
    NothingFits,
    TierLimits,
    bundled_video_models,
    choose_tier,
    tier_job,
)
from hf_memopt.presets import METHODS, preset_by_name
from hf_memopt.presets.batch import batch_settings
from hf_memopt.presets.tier_file import all_tiers, limits_in_words, tiers_of
from hf_memopt.recipe.auto import plan_here, plans_here, usable_memory
from hf_memopt.recipe.job import Job
from hf_memopt.recipe.job import load_config as load_job_config
from hf_memopt.recipe.recipe_arguments import Parsed
from hf_memopt.recipe.resume import checkpoint_to_resume
from hf_memopt.units import gib
from hf_memopt.video.inputs import VideoInputs
from hf_memopt.video.pixels import FAMILIES
from hf_memopt.video.processor import read_video_settings

logger = logging.getLogger(__name__)

_MICRO, _ACCUMULATION = "per_device_train_batch_size", "gradient_accumulation_steps"
_PIXELS = "max_pixels_per_frame"
_SMALLEST = (8, 224 * 224, 1)  # frames, pixels, micro-batch: where not even what was given fits
CLIPS_FILE = "video_clips.json"  # in output_dir: the limits of a planned run, for the run that resumes it
# TrainingArguments fields that do not change what the file's rows predict. Whole names, since a longer one may change
# it: activation_checkpointing_kwargs.
_HARMLESS = (
    "activation_checkpointing",
    "data_seed",
    "disable_tqdm",
    "effective_batch_size",
    "eval_on_start",
    "eval_steps",
    _ACCUMULATION,
    "learning_rate",
    "lr_scheduler_kwargs",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "output_dir",
    _MICRO,
    "push_to_hub",
    "report_to",
    "resume_from_checkpoint",
    "run_name",
    "seed",
    "use_cpu",
    "weight_decay",
)
_HARMLESS_PREFIXES = ("adam_", "dataloader_", "hub_", "logging_", "save_", "warmup_")


@dataclass(frozen=True)
class _Asked:
    """The decisions of the command line, the file and a profile that was named.

    Attributes:
        fixed: frames, pixels and micro-batch of it.
        unbounded: a limit that was taken away ("none"), so that there is no largest clip; None if none was.
        by: what decides, as text; empty where nothing does.
    """

    fixed: FixedLimits
    unbounded: str | None
    by: str


def choose_clips(job: Job, training: dict[str, Any], parsed: Parsed) -> dict[str, Any]:
    """Put the clips that fit into a job: its recipe's limits and its preset's micro-batch.

    With --preset auto also the plan for them: micro-batch, checkpointing and whatever else of it was not given.

    Args:
        training: the TrainingArguments fields so far.

    Returns:
        TrainingArguments fields that a plan decides.

    Raises:
        InputError: nothing fits, and none of it was asked for.
    """
    asked = _asked(job, training, parsed)
    config = load_job_config(job)
    if reason := _not_chosen(job, config, asked):
        _tell(f"{_limits(job)}{asked.by}: not chosen here, since {reason}")
        return {}
    wanted = _TierOfJob(job, config, training, parsed, asked.fixed)
    planned = plans_here(job.recipe.preset)
    chosen = (planned and _resumed(training, asked.fixed)) or wanted.of_the_file() or wanted.estimated()
    job.recipe = replace(job.recipe, max_frames=chosen.frames, max_pixels_per_frame=chosen.pixels)
    if planned:
        _tell(f"{_limits(job)}{asked.by}: {chosen.about}")
        return wanted.plan()
    job.preset = replace(job.preset, micro_batch_size=chosen.micro_batch)
    micro, accumulation = _batch(job, training)
    _tell(f"{_limits(job)}, micro-batch {micro} × {accumulation}{asked.by}: {chosen.about}")
    return {}


def _tell(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"{'frames':>8}  {text}")


def _limits(job: Job) -> str:
    return limits_in_words(job.recipe.max_frames, job.recipe.max_pixels_per_frame)


def _effective(job: Job, training: dict[str, Any]) -> int:
    if training.get(_MICRO) and training.get(_ACCUMULATION):
        return training[_MICRO] * training[_ACCUMULATION]
    batch = training.get("effective_batch_size")
    return job.preset.effective_batch_size if batch is None else batch


def _batch(job: Job, training: dict[str, Any]) -> tuple[int, int]:
    """The micro-batch and accumulation that TrainingArguments will get, on one device.

    Raises:
        InputError: no whole numbers give the effective batch.
    """
    factors = training.get(_MICRO), training.get(_ACCUMULATION)
    return batch_settings(_effective(job, training), job.preset.micro_batch_size, 1, *factors)


def _asked(job: Job, training: dict[str, Any], parsed: Parsed) -> _Asked:
    fixed = {name: getattr(job.recipe, name) for name in ("max_frames", _PIXELS) if name in parsed.given}
    batch = [name for name in (_MICRO, _ACCUMULATION) if training.get(name) is not None]
    micro, _ = _batch(job, training)  # the profile's too
    names = ", ".join([*fixed, *batch])
    reasons = [f"{names} as given"] if names else []
    if profile := job.recipe.video_profile:
        fixed.setdefault("max_frames", parsed.profile["max_frames"])
        reasons.append(f"video_profile {profile} goes over preset {job.recipe.preset}")
    micro = micro if batch or profile else None
    unbounded = next((name for name, value in fixed.items() if value is None), None)
    return _Asked(FixedLimits(**fixed, micro_batch=micro), unbounded, f" ({'; '.join(reasons)})" if reasons else "")


def _not_chosen(job: Job, config, asked: _Asked) -> str | None:
    """The reason that nothing is chosen; None where something is."""
    if asked.unbounded:
        return f"{asked.unbounded} none leaves no largest clip to predict"
    if None not in astuple(asked.fixed) and not plans_here(job.recipe.preset):
        return "all of it is given"
    if not job.preset.engine.alone or world_size() > 1 or launched_strategy() is not None:
        return "that is predicted for one device alone"
    if config.model_type not in FAMILIES:
        return f"models of the type {config.model_type} are not predicted"
    return None if job.preset.hardware.memory else "the device's memory is not known"


@dataclass(frozen=True)
class _Chosen:
    frames: int
    pixels: int | None
    micro_batch: int
    about: str


def _resumed(training: dict[str, Any], fixed: FixedLimits) -> _Chosen | None:
    """The clips of the run that is resumed, under what is given: the memory that is free now is no reason to go on
    with other data. None where no run is resumed, or its clips are not known.

    Raises:
        InputError: the checkpoint is missing or damaged.
    """
    if fixed.max_frames and fixed.max_pixels_per_frame:
        return None
    where = str(user_path(training["output_dir"]))
    named, alone = training.get("resume_from_checkpoint"), training.get("save_only_model", False)
    checkpoint = checkpoint_to_resume(
        SimpleNamespace(output_dir=where, resume_from_checkpoint=named, save_only_model=alone)
    )
    if checkpoint is None:
        return None
    try:
        began = json.loads((Path(checkpoint).parent / CLIPS_FILE).read_text(encoding="utf-8"))
        frames, pixels = fixed.max_frames or began["max_frames"], fixed.max_pixels_per_frame or began[_PIXELS]
    except (OSError, ValueError, LookupError, TypeError):
        logger.warning(
            "%s was saved without %s, so that frames are chosen anew: pass --max_frames and --max_pixels_per_frame to "
            "keep those that the run began with",
            checkpoint,
            CLIPS_FILE,
        )
        return None
    return _Chosen(frames, pixels, fixed.micro_batch or 1, "what the run that is resumed began with")


def remember_clips(job: Job) -> None:
    """Write what a plan chose for the memory that was free, as training begins: a resumed run keeps to it."""
    if job.planned is None:
        return
    folder = Path(job.args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CLIPS_FILE, {"max_frames": job.recipe.max_frames, _PIXELS: job.recipe.max_pixels_per_frame})


@dataclass(frozen=True)
class _TierOfJob:
    """The clips that fit a job, with what is given of them."""

    job: Job
    config: Any
    training: dict[str, Any]
    parsed: Parsed
    fixed: FixedLimits

    @functools.cached_property
    def bundled(self) -> str | None:
        """The bundled architecture that the model has the sizes of; None where there is none."""
        sizes = _sizes(self.config)
        return next((name for name in bundled_video_models() if _sizes(load_config(name)) == sizes), None)

    def of_the_file(self) -> _Chosen | None:
        """The preset's row of the file; None where it says nothing of this job.

        Raises:
            InputError: nothing fits, and nothing is given.
        """
        preset = self.job.preset
        if plans_here(self.job.recipe.preset) or not self.bundled or not _as_shipped(self.job, self.parsed):
            return None
        row = tiers_of(preset).get(self.bundled)
        if not row or "refused" in row or row["capacity_bytes"] > preset.hardware.memory * 1.001:
            return None
        if not row["max_frames"]:
            if self.fixed == FixedLimits():
                raise _refusal(self.job, self.bundled, row["needed_bytes"], int(row["capacity_bytes"] * SHARE))
            return None
        limits = (row["max_frames"], row["max_pixels_per_frame"], row[_MICRO])
        own = astuple(self.fixed)
        if any(user and user > limit for user, limit in zip(own, limits, strict=True)):
            return None
        frames, pixels, micro = (user or limit for user, limit in zip(own, limits, strict=True))
        if self._tokens(frames, pixels) > _longest(self.job):
            return None
        memory = f"{gib(row['device_bytes'])} of {gib(row['capacity_bytes'])} at most"
        where = f"{preset.name} with {preset.method} of {self.bundled}"
        return _Chosen(frames, pixels, micro, f"what is predicted to fit {where} ({memory})")

    def estimated(self) -> _Chosen:
        """The clips that estimates say fit, made now.

        Raises:
            InputError: nothing fits, the user set nothing, and there is no plan to make it fit.
        """
        recipe, preset, fixed = self.job.recipe, self.job.preset, self.fixed
        planned = plans_here(recipe.preset)
        memory = usable_memory(preset.hardware) if planned else preset.hardware.memory
        share = PLAN_PROFILES[recipe.profile][1] if planned else SHARE
        where = f"the {gib(memory)} that are free" if planned else preset.name
        smallest = [user or default for user, default in zip(astuple(fixed), _SMALLEST, strict=True)]
        if planned and fixed.max_frames and fixed.max_pixels_per_frame:
            return _Chosen(*smallest, "as given")
        limits = TierLimits(_effective(self.job, self.training), fixed, memory, share, _longest(self.job))
        try:
            tier = choose_tier(self._traced_job(), limits, lambda text: print(f"estimating {text}", file=sys.stderr))
        except NothingFits as short:
            if planned:
                return _Chosen(*smallest, "the smallest, which the plan then has to make fit")
            if fixed == FixedLimits():
                raise _refusal(self.job, self.bundled, short.needed, short.available) from None
            needs = f"predicted not to fit {where}: {gib(short.needed)} of the {gib(short.available)} that may be used"
            logger.warning("%s; what is given stays", needs)
            return _Chosen(*smallest, needs)
        except InputError as error:  # training may still work
            usual = (recipe.max_frames, recipe.max_pixels_per_frame, fixed.micro_batch or preset.micro_batch_size)
            return _Chosen(*usual, f"not predicted ({error})")
        usage = f"{gib(tier.estimate.device_bytes)} of {gib(memory)}"
        about = f"what is predicted to fit {where} with {preset.method} ({usage})"
        return _Chosen(tier.max_frames, tier.max_pixels_per_frame, tier.micro_batch, about)

    def _traced_job(self) -> EstimatedJob:
        job = self.job
        return tier_job(
            job.preset,
            self.config,
            # Tiers are of the preset's card, wherever the run is.
            training={name: value for name, value in self.training.items() if name != "use_cpu"},
            lora=self.parsed.lora,
            memory_args=job.memory_args,
            quantization=job.quantization,
            frozen=job.recipe.frozen,
            attn_implementation=job.recipe.attn_implementation,
            video=self._clip(*_SMALLEST[:2]),
        )

    def _clip(self, frames: int, pixels: int | None) -> VideoInputs:
        side = math.isqrt(pixels or 448 * 448)
        return VideoInputs(frames, side, side, pixels, settings=read_video_settings(self.job.model_name))

    def _tokens(self, frames: int, pixels: int | None) -> int:
        """Tokens of a sample."""
        return self._clip(frames, pixels).batch(self.config, 1)["input_ids"].shape[1]

    def plan(self) -> dict[str, Any]:
        """Plan for the memory that is free, with the clips that were chosen: the TrainingArguments fields of it."""
        job, recipe, config = self.job, self.job.recipe, self.config
        if not {"activation_checkpointing", "video_profile"} & self.parsed.given:
            self.training.pop("activation_checkpointing", None)  # the default profile's, which the user did not choose
        fields = {**self.training, "effective_batch_size": _effective(job, self.training)}
        if self.fixed.micro_batch:
            fields[_MICRO] = self.fixed.micro_batch
            fields.pop(_ACCUMULATION, None)
        clip = recipe.max_frames, recipe.max_pixels_per_frame
        planned = plan_here(
            config,
            job.preset,
            recipe.profile,
            fields,
            seq_len=self._tokens(*clip),
            lora=self.parsed.lora,
            quantization=job.quantization,
            memory_args=with_few_logits(job.memory_args, config),
            video=self._clip(*clip),
            frozen=recipe.frozen,
            attn_implementation=recipe.attn_implementation,
        )
        job.planned, job.preset, job.memory_args = planned, planned.preset, planned.memory_args
        return planned.fields


def _longest(job: Job) -> float:
    return min(filter(None, (job.recipe.max_length, job.recipe.max_video_tokens)), default=math.inf)


def _as_shipped(job: Job, parsed: Parsed) -> bool:
    """True if nothing that was given takes memory, besides the batch: the file's rows hold."""
    recipe = job.recipe
    usual = recipe.freeze_vision and not recipe.freeze_projector and recipe.dtype is None
    plain = not (parsed.lora or parsed.quantization or parsed.memory.levers() or recipe.attn_implementation)
    checkpointed = parsed.training.get("activation_checkpointing") is True
    given = parsed.training.keys() & parsed.given
    harmless = (field in _HARMLESS or field.startswith(_HARMLESS_PREFIXES) for field in given)
    return usual and plain and checkpointed and all(harmless)


def _sizes(config) -> tuple:
    """The sizes that the shapes of a model's weights follow from."""
    text, vision = config.get_text_config(), config.vision_config
    return (
        config.model_type,
        *(
            getattr(text, name, None)
            for name in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
            )
        ),
        *(
            getattr(vision, name, None)
            for name in (
                "depth",
                "hidden_size",
                "intermediate_size",
                "num_heads",
                "out_hidden_size",
                "patch_size",
                "spatial_merge_size",
                "temporal_patch_size",
            )
        ),
    )


def _refusal(job: Job, bundled: str | None, needed: int, available: int) -> InputError:
    """Nothing fits, and the nearest that does."""
    nearest = "; ".join(_nearest(job, bundled)) or "a smaller model, method=qlora, or a larger card"
    return InputError(
        f"model {bundled or job.model_name} with method={job.preset.method}: 8 frames of 224 × 224 pixels are "
        f"predicted to need at least {gib(needed)}, and {SHARE:.0%} of {job.preset.name} is {gib(available)}; "
        f"what fits: {nearest}. Set max_frames or per_device_train_batch_size to train nevertheless"
    )


def _nearest(job: Job, bundled: str | None) -> list[str]:
    """Of the file's rows: another method, a smaller model and a larger card, as far as there are any."""
    if bundled is None:
        return []
    name, method = job.preset.name, job.preset.method
    rows = [row for row in all_tiers() if row["max_frames"]]
    methods = {row["method"] for row in rows if (row["preset"], row["model"]) == (name, bundled)}
    changes = [f"method={candidate}" for candidate in METHODS if candidate in methods][:1]
    size = {model: _size(model) for model in bundled_video_models()}
    smaller = [row for row in rows if row["preset"] == name and size[row["model"]] < size[bundled]]
    smaller.sort(key=lambda row: (-size[row["model"]], row["method"] != method))
    changes += [f"{row['model']} with method={row['method']}" for row in smaller[:1]]
    larger = [
        row
        for row in rows
        if (row["model"], row["method"]) == (bundled, method)
        and preset_by_name(row["preset"], method).hardware.backend == job.preset.hardware.backend
    ]
    larger.sort(key=lambda row: row["capacity_bytes"])
    return changes + [f"{row['preset']} ({gib(row['capacity_bytes'])})" for row in larger[:1]]


def _size(model: str) -> int:
    """Layers × width²: enough to say which of two models is smaller."""
    text = load_config(model).get_text_config()
    return text.num_hidden_layers * text.hidden_size**2
