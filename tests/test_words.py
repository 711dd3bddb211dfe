"""Words of errors: lists that end, names that are nearest, and what another tool's word stands for."""

import pytest

from hf_memopt import other_names
from hf_memopt.errors import listed


@pytest.mark.parametrize(
    ("names", "most", "expected"),
    [
        (["a"], 2, "a"),
        (["a", "b"], 2, "a, b"),
        (["a", "b", "c"], 2, "a, b and 1 more"),
        (["a", "b", "c", "d"], 2, "a, b and 2 more"),
    ],
)
def test_a_list_says_how_many_more_there_are(names, most, expected):
    assert listed(names, most) == expected


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"--one", "--two"}, "--one"),  # the first that is known
        ({"--two"}, "--two 'three'"),  # a phrase whose first word is
        (set(), "say it otherwise"),  # or the last, which is advice
        ({"say"}, "say it otherwise"),
    ],
)
def test_the_meaning_that_is_known_comes_first(known, expected, monkeypatch):
    meanings = ["--one", "--two 'three'", "say it otherwise"]
    monkeypatch.setattr(other_names, "_table", lambda: {"setting": {"word": meanings}, "option": {}})
    assert other_names.meant_by("argument of a recipe", "Wo-rd", known) == expected
    assert other_names.meant_by("TrainingArguments field", "word", known) == expected
    assert other_names.meant_by("preset or option", "word", known) is None


@pytest.mark.parametrize("word", ["hardware", "world_size", "strategy", "method", "sequence_parallel", "host_memory"])
def test_an_option_behind_set_is_said_to_be_one(word):
    """A recipe has none of them."""
    assert other_names.meant_by("TrainingArguments field", word, ()) == f"--{word.replace('_', '-')}"
    assert other_names.meant_by("argument", word, ()) is None
