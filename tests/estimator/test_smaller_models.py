"""A smaller model: other sizes in a configuration, as `--set model.KEY=VALUE`, and as advice for untrained ones."""

import json

import pytest
from transformers import Gemma3TextConfig, LlamaConfig

from hf_memopt import InputError
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.smaller import is_from_scratch, smaller_sizes, with_sizes


def test_other_sizes(subtests):
    for model, changes, expected in [
        (
            "llama-3.2-1b",
            {
                **{"num_hidden_layers": 12, "hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 64},
                "num_key_value_heads": 2,
            },
            {"num_hidden_layers": 12, "hidden_size": 384, "head_dim": 64, "intermediate_size": 64},
        ),
        ("llama-2-7b", {"num_attention_heads": 16}, {"num_key_value_heads": 16, "head_dim": 256}),
        ("gpt2", {"num_hidden_layers": 6, "n_embd": 384}, {"n_layer": 6, "hidden_size": 384}),
        ("qwen3-30b-a3b", {"num_experts": 64, "hidden_size": 1024}, {"num_local_experts": 64, "head_dim": 128}),
        ("gemma-3-4b", {"num_hidden_layers": 7}, {"num_hidden_layers": 7}),
        ("mixtral-8x7b", {"num_local_experts": 4, "sliding_window": 1024}, {"num_experts": 4, "sliding_window": 1024}),
    ]:
        with subtests.test(f"{model} {changes} {expected}"):
            config = load_config(model)
            text = with_sizes(config, changes).get_text_config()
            assert {name: getattr(text, name) for name in expected} == expected
            assert len(getattr(text, "layer_types", None) or [0] * text.num_hidden_layers) == text.num_hidden_layers
            assert config.to_dict() == load_config(model).to_dict(), "the configuration itself stays as it is"


def test_patterns_of_layers_are_cut_and_repeated():
    config = Gemma3TextConfig(num_hidden_layers=6)
    kinds = config.layer_types
    assert with_sizes(config, {"num_hidden_layers": 3}).layer_types == kinds[:3]
    assert with_sizes(config, {"num_hidden_layers": 8}).layer_types == kinds + kinds[:2]


def test_sizes_that_no_model_has(subtests):
    for changes, message in [
        ({"num_hiden_layers": 2}, "unknown model field 'num_hiden_layers'. Did you mean 'num_hidden_layers'"),
        ({"model_type": "gpt2"}, "unknown model field 'model_type'"),
        ({"hidden_size": "wide"}, "model.hidden_size='wide' must be of the type of 2048"),
        ({"hidden_size": 384.5}, "model.hidden_size=384.5"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be a whole number from 1"),
        ({"hidden_size": 392, "num_attention_heads": 7}, "num_key_value_heads=8 does not divide"),
        ({"hidden_size": 391}, "num_attention_heads=32 does not divide hidden_size=391: set model.num_atten"),
    ]:
        with subtests.test(f"{changes} {message}"), pytest.raises(InputError, match=message):
            with_sizes(load_config("llama-3.2-1b"), changes)


def test_trained_weights_are_seen(tmp_path):
    config = LlamaConfig(num_hidden_layers=2)
    assert is_from_scratch(config) and not is_from_scratch(load_config("llama-3.2-1b"))
    assert is_from_scratch(with_sizes(load_config("llama-3.2-1b"), {"num_hidden_layers": 2}))
    config.save_pretrained(tmp_path)
    assert is_from_scratch(load_config(tmp_path)) and is_from_scratch(load_config(tmp_path / "config.json"))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert not is_from_scratch(load_config(tmp_path)) and not is_from_scratch(load_config(tmp_path / "config.json"))


def test_directions_in_which_a_model_shrinks():
    layers, width, experts = smaller_sizes(load_config("mixtral-8x7b"))
    assert [sizes["num_hidden_layers"] for sizes in layers] == [24, 16, 8]
    assert width[0] == {
        **{"hidden_size": 2048, "num_attention_heads": 16, "intermediate_size": 7168, "num_key_value_heads": 4},
    }
    assert experts == [{"num_local_experts": 4}, {"num_local_experts": 2}]
    for direction in (layers, width, experts):
        for sizes in direction:
            with_sizes(load_config("mixtral-8x7b"), sizes)


@pytest.mark.slow
def test_estimate_of_a_smaller_model(command, tmp_path):
    LlamaConfig(
        num_hidden_layers=8, hidden_size=256, intermediate_size=512, num_attention_heads=4, vocab_size=1000
    ).save_pretrained(tmp_path)

    def estimated(*words):
        code, out, _ = command("estimate", str(tmp_path), "--preset", "rtx_4090", "--seq-len", 256, "--json", *words)
        assert code == 0
        return json.loads(out)["breakdown"]["parameters"]

    whole, half = estimated(), estimated("--set", "model.num_hidden_layers=4")
    layer = 4 * (4 * 256 * 256 + 3 * 256 * 512 + 2 * 256)
    assert whole - half == pytest.approx(4 * layer, rel=0.01)
    code, _, err = command("estimate", str(tmp_path), "--set", "model.num_layers=4")
    assert code == 2 and "unknown model field 'num_layers'" in err and "num_hidden_layers" in err
    code, _, err = command("plan", str(tmp_path), "--hardware", "rtx_4090", "--set", "model.num_hidden_layers=4")
    assert code == 2 and "give plan a config.json" in err
