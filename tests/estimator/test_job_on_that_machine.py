"""Without a preset: the settings of the card that --hardware names, else what transformers does by itself."""

import json

import pytest
import torch

from hf_memopt import estimate
from hf_memopt.estimator.tracing.model import resolve_dtype
from hf_memopt.hardware import list_hardware
from hf_memopt.presets import get_preset, list_presets
from hf_memopt.presets.named_presets import nearest_preset


def _config(dtype=None, positions=2048):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=256,
        max_position_embeddings=positions,
        dtype=dtype,
    )


@pytest.mark.parametrize(("dtype", "bytes_each"), [(None, 4), ("bfloat16", 2), (torch.float16, 2), ("float32", 4)])
def test_weights_have_the_checkpoints_dtype(dtype, bytes_each):
    config = _config(dtype)
    weights = 2 * 256 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    held = estimate(config, {"optim": "sgd"}, 32, "cpu").breakdown["parameters"]
    assert held == pytest.approx(weights * bytes_each, rel=0.01)
    assert estimate(config, {"optim": "sgd"}, 32, "cpu", dtype="float32").breakdown["parameters"] == pytest.approx(
        weights * 4, rel=0.01
    )


def test_the_dtype_is_the_one_that_from_pretrained_loads(tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(_config("bfloat16")).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert f"torch.{resolve_dtype(loaded.config)}" == str(loaded.dtype) == "torch.bfloat16"


def test_every_card_of_the_catalog_has_settings():
    for name in list_hardware():
        preset = get_preset(name, "lora")
        assert preset.hardware.name == name and nearest_preset(preset.hardware) in list_presets()


@pytest.fixture
def folder(tmp_path):
    _config("bfloat16", positions=128).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_cards_preset_is_taken(folder, command):
    code, out, err = command("estimate", folder, "--hardware", "rtx_4090", "--method", "lora")
    assert code == 0, err
    micro = get_preset("rtx_4090", method="lora").micro_batch_size
    said = " ".join(out.split())
    assert f"lora, {micro} × 128 tokens on" in said and "with preset rtx_4090: " in said
    _, out, _ = command("estimate", folder, "--hardware", "rtx_4090", "--method", "lora", "--json")
    found = json.loads(out)
    assert (found["preset"], found["dtype"]) == ("rtx_4090", "bfloat16") and found["training_arguments"]["bf16"]


def test_a_card_without_a_preset_names_the_nearest(folder, command):
    _, out, err = command("estimate", folder, "--hardware", "rtx_a6000")
    assert "with settings of rtx_a6000 with the sizes of preset l40s: " in " ".join(out.split()), err


def test_plain_arguments_where_nothing_is_named(folder, command):
    code, out, err = command("estimate", folder)
    assert code == 0, err
    said = " ".join(out.split())
    assert "full, 8 × 128 tokens on" in said and "with plain TrainingArguments: " in said
    _, out, _ = command("estimate", folder, "--json", "--world-size", 2)
    found = json.loads(out)
    assert (found["preset"], found["dtype"]) == (None, "bfloat16")
    assert found["training_arguments"]["per_device_train_batch_size"] == 8
    assert "use_cpu" not in found["training_arguments"]


@pytest.mark.slow
def test_a_named_preset_and_a_named_dtype_stay(folder, command):
    words = ("--preset", "cpu", "--hardware", "rtx_4090", "--json")
    found = json.loads(command("estimate", folder, *words)[1])
    assert (found["preset"], found["dtype"]) == ("cpu", "float32")
    found = json.loads(command("estimate", folder, *words, "--set", "dtype=auto")[1])
    assert found["dtype"] == "bfloat16"
