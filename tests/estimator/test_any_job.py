"""Random TrainingArguments, adapters, engines and tasks: every job ends in an Estimate or an InputError."""

import dataclasses
import enum
import math
import types
import typing

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hf_memopt.errors import InputError
from hf_memopt.estimator import Estimate, estimate
from hf_memopt.estimator.tracing.tasks import TASKS

_SIZES = {
    **{"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 64, "intermediate_size": 48},
}
_MODELS = {
    **{"llama": _SIZES, "mixtral": {**_SIZES, "num_key_value_heads": 2, "num_local_experts": 2}, "bert": _SIZES},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 64},
    "t5": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "num_layers": 2, "vocab_size": 64},
    "vit": {**{key: value for key, value in _SIZES.items() if key != "vocab_size"}, "image_size": 32},
}
_WRONG = st.sampled_from([None, True, -1, 0, 2.5, math.nan, "", "wrong", [], {}, {"wrong": 1}, object()])
_NUMBERS = {int: [-1, 0, 1, 2, 3], float: [-1.0, 0.0, 0.1, 0.9, 1.0, 3.0], bool: [True, False]}
_TEXTS = ["no", "steps", "epoch", "auto", "default", "wrong"]
_DICTS = [{}, {"use_reentrant": False}, {"every_n_layers": 2}, {"num_cycles": 2}, {"wrong": 1}]


def _values(hint, default) -> st.SearchStrategy:
    """Values of a field: mostly of its type."""
    parts = (
        typing.get_args(hint)
        if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
        else (hint,)
    )
    known = [default]
    for part in parts:
        part = typing.get_origin(part) or part
        if part in _NUMBERS:
            known += _NUMBERS[part]
        elif part is str:
            known += _TEXTS
        elif part is dict:
            known += _DICTS
        elif isinstance(part, type) and issubclass(part, enum.Enum):
            known += [item.value for item in part]
    return st.one_of(*[st.sampled_from(known)] * 6, _WRONG)


def _fields_of(kind) -> dict[str, st.SearchStrategy]:
    hints = typing.get_type_hints(kind)
    defaults = {
        item.name: None if item.default is dataclasses.MISSING else item.default
        for item in dataclasses.fields(kind)
        if item.init
    }
    return {name: _values(hints[name], default) for name, default in defaults.items()}


def _some_of(fields: dict[str, st.SearchStrategy], most: int) -> st.SearchStrategy:
    names = st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


def _training_arguments() -> st.SearchStrategy:
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames

    fields = _fields_of(TrainingArguments)
    fields["optim"] = st.sampled_from([*(name.value for name in OptimizerNames), "wrong"])
    fields["deepspeed"] = st.sampled_from(
        [None, "zero1", "zero2", "zero3", "wrong", {}, {"zero_optimization": {"stage": 2}}]
    )
    sizes = st.sampled_from([1, 1, 2, 3, 0, -1])
    fields |= {name: sizes for name in ("per_device_train_batch_size", "gradient_accumulation_steps")}
    return st.builds(dict.__or__, _some_of(fields, 4), st.just({"report_to": "none"}))


def _adapters() -> st.SearchStrategy:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING

    return st.sampled_from(sorted(PEFT_TYPE_TO_CONFIG_MAPPING, key=str)).flatmap(
        lambda name: _adapter(PEFT_TYPE_TO_CONFIG_MAPPING[name])
    )


def _adapter(kind) -> st.SearchStrategy:
    fields = _fields_of(kind)
    fields["target_modules"] = st.sampled_from(["all-linear", ["q_proj"], ["wrong"], None])

    def make(values):
        try:
            return kind(**values)
        except Exception:  # peft refuses it before any estimate begins
            return None

    return _some_of(fields, 3).map(make)


def _jobs() -> st.SearchStrategy:
    names = [name for row in TASKS.values() for name in (row.auto_class, *row.pipelines)]
    return st.fixed_dictionaries(
        {
            "model": st.sampled_from(sorted(_MODELS)),
            "args": _training_arguments(),
            "seq_len": st.sampled_from([1, 7, 16, 16, 0, -1, 10**9]),
            "hardware": st.sampled_from(["cpu", "rtx_4090", "mi300x", "apple_m2_16gb", "wrong"]),
            "peft_config": st.one_of(st.none(), _adapters()),
            "dtype": st.sampled_from(["float32", "bfloat16", "float16", "int8", "wrong"]),
            "attn_implementation": st.sampled_from(
                [None, None, None, "eager", "sdpa", "flash_attention_2", "flex_attention", "wrong", ""]
            ),
            "task": st.one_of(*[st.none()] * 3, st.sampled_from([*TASKS, *names, "wrong"])),
            "world_size": st.sampled_from([None, None, 1, 2, 3, 0, -1]),
            "strategy": st.sampled_from([None, None, "ddp", "fsdp2", "zero2", "zero3", "tp2", "hsdp2", "wrong"]),
            **{"padded": st.booleans(), "packed": st.booleans(), "rank": st.sampled_from([None, None, 0, 1, 9, -1])},
        }
    )


def _check(job: dict) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(job["model"], **_MODELS[job["model"]])
    before = torch.get_default_dtype()
    try:
        result = estimate(**{**job, "model": config})
    except InputError as error:
        assert "\n" not in str(error)
        assert str(error).strip()
    else:
        assert isinstance(result, Estimate)
        assert result.peak_allocated_bytes == sum(result.breakdown.values()) > 0
    assert torch.get_default_dtype() is before


_FEW = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(**_FEW, max_examples=25)
@given(job=_jobs())
def test_an_estimate_or_an_input_error(job):
    _check(job)


@pytest.mark.slow
@settings(**_FEW, max_examples=150)
@given(job=_jobs())
def test_an_estimate_or_an_input_error_at_length(job):
    _check(job)
