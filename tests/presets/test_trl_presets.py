"""Presets build the configuration classes of TRL 1.16."""

import dataclasses
import warnings

import pytest
import trl
from transformers import TrainingArguments

from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset
from hf_memopt.presets.trl_configs import DEFAULTS, check_config_class, preset_fields, sequences_per_sample

CLASSES = [
    kind
    for name in trl.__all__
    if name.endswith("Config")
    for kind in [getattr(trl, name)]
    if isinstance(kind, type) and issubclass(kind, TrainingArguments)
]


def build(tmp_path, kind, name="cpu", method="full", **fields):
    preset = get_preset(name, method)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # of names that transformers deprecates, and TRL's defaults set
        return preset, preset.training_arguments(
            str(tmp_path), world_size=1, use_cpu=True, config_class=kind, **fields
        )


def test_every_configuration_class_of_trl_is_here():
    names = {kind.__name__ for kind in CLASSES}
    assert {"SFTConfig", "DPOConfig", "KTOConfig", "RewardConfig", "GRPOConfig", "RLOOConfig"} <= names


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("name", "method"), [("cpu", "full"), ("rtx_4090", "qlora")])
def test_a_preset_builds_every_configuration_class(kind, name, method, tmp_path):
    preset, args = build(tmp_path, kind, name, method)
    plain = preset.training_arguments(str(tmp_path), world_size=1, use_cpu=True)
    assert type(args) is kind
    for field in ("bf16", "fp16", "activation_checkpointing", "activation_checkpointing_kwargs", "optim"):
        assert getattr(args, field) == getattr(plain, field), f"{field} is the preset's, not TRL's default"
    assert args.gradient_checkpointing == args.activation_checkpointing
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == preset.effective_batch_size
    if hasattr(args, "max_length"):
        assert args.max_length == preset.seq_len


def test_own_fields_of_a_class_go_over_the_presets(tmp_path):
    _, args = build(tmp_path, trl.SFTConfig, max_length=512, packing=True, learning_rate="1e-5")
    assert (args.max_length, args.packing, args.learning_rate) == (512, True, 1e-5)
    _, args = build(tmp_path, trl.DPOConfig, loss_type=["ipo"], precompute_ref_log_probs=True, max_length=None)
    assert build(tmp_path, trl.DPOConfig, loss_type="ipo")[1].loss_type == ["ipo"]
    assert (args.loss_type, args.precompute_ref_log_probs, args.max_length) == (["ipo"], True, None)


def test_a_micro_batch_of_pairs_has_as_many_sequences(tmp_path):
    preset, pairs = build(tmp_path, trl.DPOConfig, "rtx_4090", "qlora")
    _, texts = build(tmp_path, trl.SFTConfig, "rtx_4090", "qlora")
    assert pairs.per_device_train_batch_size * 2 == texts.per_device_train_batch_size == preset.micro_batch_size
    _, pairs = build(tmp_path, trl.DPOConfig, "rtx_4090", "qlora", per_device_train_batch_size=preset.micro_batch_size)
    assert pairs.per_device_train_batch_size == preset.micro_batch_size, "what the user says stays"
    plain = TrainingArguments
    assert check_config_class(None) is plain and check_config_class(plain) is plain
    assert [sequences_per_sample(kind) for kind in (plain, trl.SFTConfig, trl.RewardConfig)] == [1, 1, 2]
    silent = {"activation_checkpointing": False, "bf16": False}
    assert preset_fields(preset, plain) == preset_fields(dataclasses.replace(preset, name=""), trl.SFTConfig) == {}
    assert preset_fields(preset, trl.SFTConfig) == {**silent, "max_length": preset.seq_len}
    assert preset_fields(preset, trl.GRPOConfig) == silent


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (trl.SFTConfig, {"max_lenght": 5}, "unknown SFTConfig field 'max_lenght'.*max_length"),
        (trl.DPOConfig, {"packing": True}, "unknown DPOConfig field 'packing'"),
        (None, {"max_length": 512}, "unknown TrainingArguments field 'max_length'"),
        (trl.ModelConfig, {}, "config_class=.*ModelConfig.* must be TrainingArguments or a subclass"),
        ("SFTConfig", {}, "config_class='SFTConfig' must be"),
        (trl.DPOConfig, {"max_length": "long"}, "max_length"),
    ],
)
def test_what_a_class_does_not_take_is_refused(kind, fields, message, tmp_path):
    with pytest.raises(InputError, match=message):
        build(tmp_path, kind, **fields)


def test_the_defaults_named_are_those_of_the_installed_trl():
    for default, name in [(row, name) for row in DEFAULTS for name in row.classes]:
        (item,) = [item for item in dataclasses.fields(getattr(trl, name)) if item.name == default.field]
        value = item.default_factory() if item.default is dataclasses.MISSING else item.default
        assert value == default.value, name
