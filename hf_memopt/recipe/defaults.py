"""Defaults of recipes where the user sets nothing, and arguments that contradict each other."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.errors import InputError, choose
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.presets import DTYPES
from hf_memopt.recipe.recipe_arguments import Parsed, RecipeArguments

logger = logging.getLogger(__name__)


# For every recipe, under its own defaults.
_DEFAULTS = {
    "lr_scheduler_type": "cosine",
    "num_train_epochs": 1,
    "logging_steps": 10,
    "eval_strategy": "steps",
    "eval_steps": 100,
    "eval_on_start": True,
    "save_total_limit": 2,
}


@dataclass(frozen=True, kw_only=True)
class RecipeDefaults:
    """The defaults of a recipe where the user sets nothing.

    Attributes:
        description: for --help.
        training: TrainingArguments fields.
        adapters: more of them, for LoRA and QLoRA.
        builtin: more of them, and of the recipe's own arguments, for the built-in model.
        model: makes the built-in model.
        scratch: the built-in model starts from random weights of its architecture.
        arguments: the recipe's own; its `prepare(job, training, parsed, own_model)` changes the job before
            TrainingArguments are built, and returns fields of them.
        task: of TRL's, for a plan of what is free here; None for the plain Trainer.
        config_class: returns the subclass of TrainingArguments whose fields are arguments; called after the preset's
            environment is set.
    """

    description: str = ""
    training: dict[str, Any] = field(default_factory=dict)
    adapters: dict[str, Any] = field(default_factory=dict)
    builtin: dict[str, Any] = field(default_factory=dict)
    model: Callable[[], Path] = builtin_model
    scratch: bool = False
    arguments: type = RecipeArguments
    task: str | None = None
    config_class: Callable[[], type] | None = None


def with_defaults(parsed: Parsed, defaults: RecipeDefaults, own_model: bool) -> tuple[RecipeArguments, dict[str, Any]]:
    """The recipe's arguments and the TrainingArguments fields, the user's over the recipe's defaults."""
    recipe = parsed.recipe
    training = {**_DEFAULTS, **defaults.training, **(defaults.adapters if recipe.method != "full" else {})}
    if own_model:
        return recipe, training | parsed.training
    weights = "config_name" if defaults.scratch and recipe.method == "full" else "model_name_or_path"
    own_fields = {weights: str(defaults.model())}
    if recipe.method != "full":
        logger.warning(
            "the built-in model is untrained: an adapter on it shows that the recipe runs, not a useful result"
        )
    builtin = {name: value for name, value in defaults.builtin.items() if name not in parsed.given}
    if "effective_batch_size" in parsed.given:  # which the default micro-batch need not divide
        builtin.pop("per_device_train_batch_size", None)
    own_fields |= {name: builtin.pop(name) for name in list(builtin) if hasattr(recipe, name)}
    return replace(recipe, **own_fields), training | parsed.training | builtin


def check_data(recipe: RecipeArguments, defaults: RecipeDefaults) -> None:
    """Refuse a model of the user's without data: what is built in would train it on a few questions, unnoticed.

    Args:
        recipe: as the user gave it, before the defaults.
    """
    named = recipe.model_name_or_path or recipe.config_name
    if recipe.dataset_name is not None or named is None:
        return
    if not (Path(named).is_dir() and Path(named).resolve() == defaults.model().resolve()):
        raise InputError(
            f"model {named!r} needs your data: pass --dataset_name with a file, folder or hub name (docs/data.md); "
            "only the built-in model trains on built-in data"
        )


def check_recipe(recipe: RecipeArguments, training: dict[str, Any]) -> None:
    """Raise InputError for arguments that contradict each other."""
    if recipe.model_name_or_path and recipe.config_name:
        raise InputError("set model_name_or_path (trained weights) or config_name (random weights), not both")
    if recipe.config_name and recipe.method != "full":
        raise InputError(f"method={recipe.method} needs trained weights: pass model_name_or_path, or use method=full")
    if recipe.streaming and (training.get("max_steps") or -1) <= 0:
        raise InputError("a stream has no known length: set max_steps")
    if recipe.dtype not in (None, *DTYPES):
        raise choose("dtype", recipe.dtype, DTYPES)
    if recipe.profile not in PLAN_PROFILES:
        raise choose("profile", recipe.profile, PLAN_PROFILES)
    if recipe.held_out < 0:
        raise InputError(f"held_out={recipe.held_out} must be 0, a share below 1, or a number of rows")
