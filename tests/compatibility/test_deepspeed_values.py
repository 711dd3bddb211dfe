"""Every value of a DeepSpeed JSON, replaced by each wrong one: an engine, or one sentence; doctor says the same."""

import copy
import itertools
import json

import pytest
from conftest import ROOT

from hf_memopt.compatibility.config_files import find_faults
from hf_memopt.engines import DeepSpeed, deepspeed_values
from hf_memopt.engines.deepspeed import deepspeed_config
from hf_memopt.errors import InputError
from hf_memopt.findings import Effect, Finding, refused

ODD = (None, True, 5, -1, "x", [], {}, float("inf"))
OPTIMIZER = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "activation_checkpointing": {"partition_activations": False},
    "steps_per_print": 10,
}
SHIPPED = {path.stem: json.loads(path.read_text()) for path in (ROOT / "accelerate_configs" / "deepspeed").glob("*")}
FILES = {**SHIPPED, "optimizer": {**SHIPPED["zero2"], **OPTIMIZER}}


def replaced(content):
    """Copies of a content, each with one value replaced, and the keys to it."""

    def places(value, keys=()):
        yield keys
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, one in inner:
            yield from places(one, (*keys, key))

    for keys in places(content):
        for odd in ODD if keys else ():
            changed = copy.deepcopy(content)
            parent = changed
            for key in keys[:-1]:
                parent = parent[key]
            parent[keys[-1]] = copy.deepcopy(odd)
            yield keys, changed


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_any_value_is_read_or_refused(name, tmp_path):
    path, refused = tmp_path / "a.json", 0
    assert DeepSpeed.of_config(deepspeed_config(FILES[name])).deepspeed
    for keys, content in replaced(FILES[name]):
        path.write_text(json.dumps(content))
        try:
            assert DeepSpeed.of_config(deepspeed_config(str(path))).strategy.startswith("zero")
        except InputError as error:
            refused += 1
            assert str(error).startswith("deepspeed: ") and "\n" not in str(error), keys
            assert find_faults(path), keys
    assert refused > 50


WRONG_BLOCKS = [
    ({"zero_optimization": []}, "zero_optimization=[] must be a mapping"),
    ({"zero_optimization": {"stage": "three"}}, "zero_optimization.stage='three' must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "zero_optimization.stage=True must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": "3"}}, "zero_optimization.stage='3' must be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": None}}, "offload_optimizer=None must be a mapping"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": 1}}, "offload_optimizer=1 must be a mapping"),
    ({"fp16": {"enabled": "true"}}, "fp16.enabled='true' must be written without quotes"),
    ({"train_batch_size": "x"}, "train_batch_size='x' must be a whole number"),
    ({"gradient_clipping": []}, "gradient_clipping=[] must be a number"),
    ({"optimizer": 5}, "optimizer=5 must be a mapping"),
    ({"aio": {"queue_depth": True}}, "aio.queue_depth=True must be a whole number"),
    ({"flops_profiler": 5}, "DeepSpeed cannot read the configuration: "),
]


def test_a_wrong_value_is_named(subtests):
    for block, message in WRONG_BLOCKS:
        with subtests.test(f"{block} {message}"):
            with pytest.raises(InputError) as refused:
                deepspeed_config({"train_micro_batch_size_per_gpu": "auto", **block})
            assert str(refused.value).startswith("deepspeed: ") and message in str(refused.value)


@pytest.mark.slow
@pytest.mark.sweep
def test_what_is_not_refused_can_be_estimated():
    from transformers import LlamaConfig

    from hf_memopt import estimate

    tiny = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    seen, ended = set(), []
    for name in ("zero1", "zero2_offload_cpu", "zero3", "zero3_offload_nvme"):
        for keys, content in replaced(FILES[name]):
            try:
                deepspeed_config(content)
            except InputError:
                continue
            if (keys, str(content)) in seen:
                continue
            seen.add((keys, str(content)))
            fields = {"deepspeed": content, "per_device_train_batch_size": 1, "bf16": True}
            try:
                estimate(tiny, fields, seq_len=32, hardware="a100_80gb", world_size=2)
                ended.append(keys)
            except InputError as error:
                assert "\n" not in str(error)
    assert len(ended) > 50


WRONG = [
    ({"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": None}, []),
    ({"train_micro_batch_size_per_gpu": 1}, []),
    ({"train_micro_batch_size_per_gpu": 0}, [("train_micro_batch_size_per_gpu",)]),
    ({"gradient_accumulation_steps": "4"}, [("gradient_accumulation_steps",)]),
    ({"train_micro_batch_size_per_gpu": True}, [("train_micro_batch_size_per_gpu",)]),
    ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, []),
    ({"zero_optimization": {"stage": 4}}, [("zero_optimization", "stage")]),
    ({"bf16": {"enabled": "auto"}}, []),
    ({"bf16": {"enabled": "true"}}, [("bf16", "enabled")]),
    ({"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}, []),
    ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, [("train_batch_size",)]),
    ({"train_batch_size": -10, "train_micro_batch_size_per_gpu": 4}, [("train_batch_size",)]),
    ({"gradient_clipping": 0}, []),
    ({"gradient_clipping": -1}, [("gradient_clipping",)]),
]


def test_wrong_values_are_named(subtests):
    for content, named in WRONG:
        with subtests.test(f"{content} {named}"):
            assert [finding.keys for finding in deepspeed_values._wrong_values(content)] == named


def test_which_wrong_values_deepspeed_accepts():
    """It multiplies counts that it was given as fractions or true, where no whole batch is given."""
    for content, effect in (
        ({"gradient_accumulation_steps": 0.5}, Effect.ACCEPTED),
        ({"gradient_accumulation_steps": 1.5}, Effect.ACCEPTED),
        ({"gradient_accumulation_steps": 1.5, "train_batch_size": 6}, Effect.REFUSED),
        ({"gradient_accumulation_steps": 0.0}, Effect.REFUSED),
        ({"gradient_accumulation_steps": -0.5}, Effect.REFUSED),
        ({"gradient_accumulation_steps": True}, Effect.ACCEPTED),
        ({"gradient_accumulation_steps": 0}, Effect.REFUSED),
        ({"gradient_accumulation_steps": "4"}, Effect.REFUSED),
        ({"zero_optimization": {"stage": "3"}}, Effect.ACCEPTED),
        ({"zero_optimization": {"stage": 1.0}}, Effect.ACCEPTED),
        ({"zero_optimization": {"stage": 4}}, Effect.REFUSED),
        ({"gradient_clipping": -1}, Effect.ACCEPTED),
    ):
        assert [finding.effect for finding in deepspeed_values._wrong_values(content)] == [effect], content


def test_what_must_be_a_mapping():
    for content, named in (
        ({}, []),
        ({"zero_optimization": {}, "fp16": {"enabled": True}, "aio": None}, []),
        ({"aio": 5}, ["aio=5 must be a mapping"]),
        ({"fp16": None, "optimizer": "adam"}, ["fp16=None must be a mapping: leave it out", "optimizer='adam' must"]),
        ({"zero_optimization": {"offload_param": []}}, ["zero_optimization.offload_param=[] must be a mapping"]),
        ({"zero_optimization": []}, ["zero_optimization=[] must be a mapping"]),
    ):
        found = sorted(finding.text for finding in deepspeed_values._not_mappings(content))
        assert len(found) == len(named) and all(map(str.startswith, found, named)), found


def test_auto_is_what_accelerate_makes_of_it(subtests):
    """Of a stage and of devices; every other word stays."""
    from accelerate.utils import DeepSpeedPlugin

    sizes = {"train_micro_batch_size_per_gpu": "auto"}
    for stage, *devices in itertools.product((3, "auto"), ("cpu", "auto"), ("cpu", "auto")):
        names = ("offload_optimizer", "offload_param")
        offloads = {name: {"device": device, "pin_memory": True} for name, device in zip(names, devices, strict=True)}
        config = sizes | {"zero_optimization": {"stage": stage, **offloads}}
        filled = DeepSpeedPlugin(hf_ds_config=copy.deepcopy(config)).hf_ds_config.config["zero_optimization"]
        with subtests.test(stage=stage, devices=devices):
            assert deepspeed_config(config) == sizes | {"zero_optimization": filled}
            strategy = f"zero{2 if stage == 'auto' else 3}{'_offload_cpu' if devices[0] == 'cpu' else ''}"
            assert DeepSpeed.of_config(deepspeed_config(config)).strategy == strategy


def test_which_values_are_refused():
    found = [Finding(("a", "b"), "x"), Finding((), "of the file"), Finding(("c",), "y", Effect.ACCEPTED)]
    assert refused(found) == [("a", "b")]
