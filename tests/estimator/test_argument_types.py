"""estimate(), plan() and get_preset() with arguments of wrong types: one sentence, whatever it is."""

import inspect
from enum import Enum

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TrainingArguments

from hf_memopt import InputError, estimate, get_preset, plan
from hf_memopt.estimator.job import describe
from hf_memopt.field_values import _accepts, fit, hints_of

WRONG = [None, 3, -1, 1.5, "", "lora", "float7", "2x3090", [], {}, object(), True, b"x", ("a",), float("nan"), int]


@pytest.fixture(scope="module")
def tiny():
    from transformers import GPT2Config

    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": 64}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)


def refused_or_taken(function, **arguments) -> None:
    try:
        function(**arguments)
    except InputError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"model": None}, "model=None must be a text, not nothing"),
        ({"args": "sft"}, "args='sft' must be a TrainingArguments or a mapping"),
        ({"hardware": None}, "hardware=None must be a text or a Hardware, not nothing"),
        ({"hardware": "2x3090"}, "unknown hardware '2x3090'. Did you mean 'rtx_3090'?"),
        ({"peft_config": "lora"}, "peft_config='lora' must be one of peft's configurations"),
        ({"dtype": "float7"}, "dtype='float7' must be auto, or one of torch's floating-point types"),
        ({"dtype": "int8"}, "dtype='int8' must be auto"),
        ({"seq_len": "lora"}, "seq_len='lora' must be a whole number"),
        ({"padded": "no"}, "padded='no' must be true or false"),
        ({"memory_args": {}}, "memory_args={} must be a MemoryArguments, not a mapping"),
        ({"rank": 1}, "rank=1 must be from 0 to 0"),
    ],
)
def test_sentences_of_estimate(arguments, sentence, tiny):
    with pytest.raises(InputError) as raised:
        estimate(**{"model": tiny, "args": {}, "seq_len": 16, "hardware": "cpu"} | arguments)
    assert sentence in str(raised.value)


def test_torchs_dtypes_are_taken(tiny):
    assert describe(tiny, {}, 16, "cpu", dtype=torch.bfloat16).dtype == "bfloat16"


def test_every_argument_of_estimate(tiny):
    names = set(inspect.signature(estimate).parameters)
    for name in names:
        for value in WRONG:
            arguments = {"model": tiny, "args": {}, "seq_len": 16, "hardware": "cpu"} | {name: value}
            refused_or_taken(describe, **arguments)


def test_every_argument_of_get_preset(subtests):
    for name in ["name", "method", "strategy", "precision"]:
        with subtests.test(f"{name}"):
            for value in WRONG:
                refused_or_taken(get_preset, **{"name": "rtx_4090"} | {name: value})


# Those that a plan would take are left out: a plan takes seconds.
REFUSED = {
    "hardware": [None, 3, [], object(), True, b"x", float("nan"), int],
    "effective_batch_size": ["lora", 1.5, object(), ("a",), {1: 2}, True, 0],
    **{"seq_len": ["lora", 1.5, object(), ("a",), {1: 2}, True, -1], "memory": ["24GB", [], {}, float("nan"), 0]},
    **{"training": [3, "lora", ("a",)], "lora": [3, "lora", ("a",)], "memory_args": [3, "lora", {}]},
    **{"quantization": [3, "lora", {"load_in_4bit": True}, {"no_field": 1}], "host_memory": ["64GB", float("nan")]},
    **{"method": [None, 3, []], "strategy": [3, [], b"x"]},
}


def test_every_argument_of_plan(tiny):
    for name, value in ((name, value) for name, values in REFUSED.items() for value in values):
        with pytest.raises(InputError):
            plan(**{"model": tiny, "hardware": "rtx_4090", "seq_len": 16, "method": "lora"} | {name: value})


values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=4)
nested = values | st.lists(values, max_size=2) | st.dictionaries(st.text(max_size=4), values, max_size=2)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(name=st.sampled_from(sorted(inspect.signature(estimate).parameters)), value=nested)
def test_any_value_of_any_argument(name, value, tiny):
    refused_or_taken(describe, **{"model": tiny, "args": {}, "seq_len": 16, "hardware": "cpu"} | {name: value})


def test_what_is_in_a_container_is_looked_at(subtests):
    for hint, value, taken in [
        *((list[int], [1, 2], True), (list[int], [1, "2"], False), (tuple[float, float], (0.9, 0.95), True)),
        (tuple[float, float], (0.9, "0.95"), False),
        (tuple[int, str], (1, "2"), True),  # of several types the dataclass itself asks
        (dict[str, int], {"a": 1}, True),
        (dict[str, int], {"a": "1"}, False),
    ]:
        with subtests.test(f"{hint} {value} {taken}"):
            assert _accepts(hint, value) == taken


def test_what_arguments_hold_is_taken_as_it_is(tmp_path):
    """Fields of transformers' enumerations are texts, too; each of their values stays what it was."""
    hints = hints_of(TrainingArguments)
    kinds = {name: type(value) for name, value in vars(TrainingArguments(tmp_path, use_cpu=True)).items()}
    enumerations = {name: kind for name, kind in kinds.items() if name in hints and issubclass(kind, Enum)}
    assert {"eval_strategy", "save_strategy", "optim", "lr_scheduler_type"} <= enumerations.keys()
    for name, kind in enumerations.items():
        for value in kind:
            assert fit(hints, {name: value}) == {name: value}
