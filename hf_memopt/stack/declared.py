"""Fields of configurations, of the installed libraries and the recipes, read from their source without an import.

transformers, peft and TRL take seconds to import, and a misspelled setting needs none of them.
"""

import ast
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any, Optional, Union

from hf_memopt.field_values import WIDER

# Class -> where its package declares it; the bases that are not here declare no fields.
_PLACES = {
    "TrainingArguments": "transformers/training_args.py",
    "OptimizerNames": "transformers/training_args.py",
    "FSDPOption": "transformers/trainer_utils.py",
    "BitsAndBytesConfig": "transformers/utils/quantization_config.py",
    "PeftConfigMixin": "peft/config.py",
    "PeftConfig": "peft/config.py",
    "LoraConfig": "peft/tuners/lora/config.py",
    "_BaseConfig": "trl/trainer/base_config.py",
    "SFTConfig": "trl/trainer/sft_config.py",
    "DPOConfig": "trl/trainer/dpo_config.py",
    "KTOConfig": "trl/trainer/kto_config.py",
    "RewardConfig": "trl/trainer/reward_config.py",
    "GRPOConfig": "trl/trainer/grpo_config.py",
    "RLOOConfig": "trl/trainer/rloo_config.py",
    "RecipeArguments": "hf_memopt/recipe/recipe_arguments.py",
    "AnswerArguments": "hf_memopt/recipe/answers.py",
    "PreferenceArguments": "hf_memopt/recipe/preference.py",
    "RolloutArguments": "hf_memopt/recipe/prompts.py",
    "VideoArguments": "hf_memopt/recipe/video.py",
}
_SIMPLE = {"int": int, "float": float, "str": str, "bool": bool}


def declared_hints(name: str) -> dict[str, Any]:
    """The fields of a dataclass, those of its bases among them, with their types; Any for types that are not simple.

    Empty where the source is not there or written otherwise: the library itself then judges, once it is imported.
    """
    if (body := _body(name)) is None:
        return {}
    hints = {}
    for base in body.bases:
        base_name = getattr(base, "id", "")
        if base_name in _PLACES:
            hints |= declared_hints(base_name)
            if not hints:
                return {}
    for item in body.body:
        is_field = isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if is_field and "ClassVar" not in ast.unparse(item.annotation):
            hints[item.target.id] = WIDER.get(item.target.id) or _type(item.annotation)
    return hints


def declared_parameters(name: str) -> frozenset[str]:
    """The parameters of a class's __init__; empty where they cannot be read."""
    made = [item for item in getattr(_body(name), "body", ()) if getattr(item, "name", "") == "__init__"]
    return frozenset(item.arg for item in made[0].args.args[1:]) if made else frozenset()


def declared_values(name: str) -> list[str]:
    """The values of an enumeration of texts; empty where they cannot be read."""
    assigned = (item.value for item in getattr(_body(name), "body", ()) if isinstance(item, ast.Assign))
    return [value.value for value in assigned if isinstance(value, ast.Constant)]


def _body(name: str) -> ast.ClassDef | None:
    return _classes(_PLACES[name]).get(name)


@cache
def _classes(place: str) -> dict[str, ast.ClassDef]:
    package, _, file = place.partition("/")
    try:
        found = importlib.util.find_spec(package)
        source = (Path(found.origin).parent / file).read_text(encoding="utf-8")
        return {item.name: item for item in ast.parse(source).body if isinstance(item, ast.ClassDef)}
    except (AttributeError, TypeError, OSError, ValueError, SyntaxError):  # not installed, or not as files
        return {}


def _type(node: ast.expr) -> Any:
    """The type of an annotation that is a simple type, one of a few, or None; Any otherwise."""
    if isinstance(node, ast.Name):
        return _SIMPLE.get(node.id, Any)
    if isinstance(node, ast.Constant) and node.value is None:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _type(node.left), _type(node.right)
        return Any if Any in (left, right) else Union[left, right]  # noqa: UP007
    if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") == "Optional":
        inner = _type(node.slice)
        return Any if inner is Any else Optional[inner]  # noqa: UP045
    return Any
