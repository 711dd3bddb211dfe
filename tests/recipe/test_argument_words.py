"""Commands that plans and migrate print say a recipe what was asked: every field, with each kind of value it takes."""

import shlex

import pytest
import transformers
import trl

from hf_memopt.errors import InputError
from hf_memopt.field_values import check_value
from hf_memopt.presets.launch_script import as_word
from hf_memopt.recipe.recipe_arguments import RecipeArguments, parse
from hf_memopt.stack.vocabulary import RENAMED, argument_hints

VALUES = (None, 2, 0.5, True, False, "a text", "it's", ["a", "b"], [0.5, 1.5], [], {"a": 1}, {"a": [None, "b"]})
# What is judged further, is the recipes' own under another type, or whose text the library itself reads as a number.
JUDGED = {
    "activation_checkpointing_kwargs",
    "include_num_input_tokens_seen",
    "debug",
    "pad_to_multiple_of",
    "loss_type",
}
OWN = {row.old for row in RENAMED} | set(vars(RecipeArguments()))


def takes(name: str, hint, value) -> bool:
    try:
        check_value(name, hint, value)
    except InputError:
        return False
    return True


@pytest.mark.parametrize("kind", [transformers.TrainingArguments, trl.SFTConfig, trl.GRPOConfig, trl.DPOConfig])
def test_a_recipe_reads_the_value_that_was_written(kind):
    asked = 0
    for value in VALUES:
        hints = argument_hints(kind).items()
        given = {name: value for name, hint in hints if name not in JUDGED | OWN and takes(name, hint, value)}
        words = [f"--{name} {as_word(value)}" for name in given]
        read = parse(shlex.split(" ".join(words)), config_class=kind).training
        assert {name: read[name] for name in given} == given, value
        asked += len(given)
    assert asked > 200
