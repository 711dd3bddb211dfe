"""Adapters merged tensor by tensor: the weights of peft's merge_and_unload(), in a few tensors' memory."""

import json
import shutil
import sys

import pytest
import torch
from conftest import slow
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_runs import TINY
from test_odd_configs import contents, one_sentence
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from benchmarks.profiled_peak import allocator_peak
from hf_memopt.contrib.merging.merge import merge_adapter
from hf_memopt.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21

ALL = {"target_modules": "all-linear"}
ADAPTERS = {
    "lora": ALL,
    "rslora": {**ALL, "use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "dora": {**ALL, "use_dora": True},
    "bias": {**ALL, "bias": "all"},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    "embedding": {"target_modules": ["embed_tokens", "down_proj"]},
}


def llama(tied=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=100,
        tie_word_embeddings=tied,
        attention_bias=True,
    )
    return LlamaForCausalLM(config)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    llama().to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def save_adapter(base, folder, **settings):
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for weight in model.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return folder


def merged_by_peft(base, adapter, **kwargs):
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, **kwargs), adapter).merge_and_unload()


def check_equal(folder, expected, **kwargs):
    found = AutoModelForCausalLM.from_pretrained(folder, **kwargs).state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight.to(found[name].dtype)), name


@pytest.mark.parametrize("kind", [kind if kind in ("dora", "trained tokens") else slow(kind) for kind in ADAPTERS])
def test_it_is_what_peft_merges(kind, base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", **ADAPTERS[kind])
    result = merge_adapter(adapter, tmp_path / "out", max_shard_size="20KB")
    files, shards = set(result.files), [name for name in result.files if name.startswith("model-")]
    assert {"config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"} <= files
    assert shards == [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    check_equal(tmp_path / "out", merged_by_peft(base, adapter).state_dict())
    assert not list(tmp_path.glob(".out*")), "nothing temporary is left"


@pytest.mark.parametrize("dtype", [slow("float32"), "float16"])
def test_another_dtype(dtype, base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", **ALL)
    result = merge_adapter(adapter, tmp_path / "out", dtype=dtype)
    assert "model.safetensors" in result.files
    check_equal(tmp_path / "out", merged_by_peft(base, adapter, dtype=dtype).state_dict())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("trained", [["embed_tokens"], slow(["lm_head"]), slow(["embed_tokens", "lm_head"])])
def test_tied_weights_that_training_separates(trained, tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"], modules_to_save=trained)
    assert not merge_adapter(adapter, tmp_path / "out").tied
    check_equal(tmp_path / "out", merged_by_peft(tmp_path / "base", adapter).state_dict())


def test_tied_weights_that_stay_so(tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "base")
    settings = {"target_modules": ["q_proj"], "trainable_token_indices": [3]}
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", **settings)
    assert merge_adapter(adapter, tmp_path / "out").tied
    check_equal(tmp_path / "out", merged_by_peft(tmp_path / "base", adapter).state_dict())


def test_a_tied_head_that_the_base_stores_too(tmp_path):
    """Its copy would be that of before training."""
    model = llama(tied=True)
    model.save_pretrained(tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    settings = {"target_modules": ["q_proj"], "trainable_token_indices": [3]}
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", **settings)
    merge_adapter(adapter, tmp_path / "out")
    check_equal(tmp_path / "out", merged_by_peft(tmp_path / "base", adapter).state_dict())


def test_a_longer_vocabulary(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(104)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
    model = get_peft_model(model, config)
    model.save_pretrained(tmp_path / "adapter")
    merge_adapter(tmp_path / "adapter", tmp_path / "out", base=base)
    check_equal(tmp_path / "out", model.merge_and_unload().state_dict())


def quantized(kind="nf4", double=True):
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "double"), [("nf4", True), slow("fp4", False)])
def test_a_base_in_4_bits(kind, double, base, tmp_path):
    packed = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantized(kind, double))
    packed.save_pretrained(tmp_path / "packed")
    adapter = save_adapter(base, tmp_path / "adapter", **ALL)
    result = merge_adapter(adapter, tmp_path / "out", base=tmp_path / "packed", reference=base)
    expected = PeftModel.from_pretrained(packed.dequantize(torch.bfloat16), adapter).merge_and_unload().state_dict()
    check_equal(tmp_path / "out", expected)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    found = result.dequantized
    assert found["quant_type"] == kind and found["tensors"] == 14
    assert 0 < found["mean_difference"] < found["max_difference"] < 0.1

    rounded = merge_adapter(adapter, tmp_path / "rounded", quantize=kind, double_quant=double)
    check_equal(tmp_path / "rounded", expected)
    assert rounded.dequantized == found, "the same rounding, made on the way"
    unknown = merge_adapter(adapter, tmp_path / "unknown", base=tmp_path / "packed")
    assert unknown.dequantized["max_difference"] is None


def test_memory_is_that_of_a_few_tensors(tmp_path):
    """The real allocator's peak, of a base with several files."""
    model = llama()
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", **ALL)
    held = sum(weight.nbytes for weight in load_file(adapter / "adapter_model.safetensors").values())
    peak = allocator_peak(lambda: merge_adapter(adapter, tmp_path / "out", max_shard_size="20KB"))
    largest = max(weight.nbytes for weight in model.parameters())
    assert peak - held <= 2 * 20_000
    assert peak - held <= 4 * largest


def test_experts_that_transformers_fuses(tmp_path):
    """They are copied as the base stores them; LoRA on them is not merged."""
    torch.manual_seed(0)
    config = MixtralConfig(**TINY | {"num_hidden_layers": 1}, num_local_experts=2)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    assert merge_adapter(adapter, tmp_path / "out").merged_tensors == 2
    check_equal(tmp_path / "out", merged_by_peft(tmp_path / "base", adapter).state_dict())


def test_progress_counts_every_tensor(base, tmp_path):
    adapter, seen = save_adapter(base, tmp_path / "adapter", **ALL), []
    result = merge_adapter(adapter, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert [number for number, _, _ in seen] == list(range(1, result.tensors + 1))
    assert {total for _, total, _ in seen} == {result.tensors}
    assert result.merged_tensors == 14


def test_nothing_half_written(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", **ALL)

    def stop(number, *_):
        if number == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_adapter(adapter, tmp_path / "out", progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter"]


REFUSED = {
    "another method": ({"peft_type": "LOHA"}, "peft_type=LOHA is not merged"),
    "experts": ({"target_parameters": ["experts.down_proj"]}, "target_parameters of .* is not merged"),
    "changed base": ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa of .* changed the base"),
    "no base": ({"base_model_name_or_path": None}, "give it with --base"),
    "unknown base": ({"base_model_name_or_path": "nobody/nothing"}, "neither a folder nor a model on the hub"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case, base, tmp_path):
    change, reason = REFUSED[case]
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=reason):
        merge_adapter(adapter, tmp_path / "out")


def test_bases_that_are_refused(base, tmp_path):
    adapter = save_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    config = json.loads((base / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(InputError, match="no such file"):
        merge_adapter(adapter, tmp_path / "out", base=other)
    (other / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(InputError, match="quantized with gptq"):
        merge_adapter(adapter, tmp_path / "out", base=other)
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has no model\.safetensors"):
        merge_adapter(adapter, tmp_path / "out", base=other)
    (other / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        merge_adapter(adapter, tmp_path / "out", base=other)
    assert not (tmp_path / "out").exists()


def test_a_tied_weight_with_lora_is_refused(tmp_path):
    llama(tied=True).save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["embed_tokens"])
    with pytest.raises(InputError, match="which embedding and head share"):
        merge_adapter(adapter, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "int8"}, "dtype"),
        ({"quantize": "int4"}, "quantize"),
        ({"max_shard_size": "many"}, "max_shard_size='many'"),
    ],
)
def test_options(options, reason, tmp_path):
    with pytest.raises(InputError, match=reason):
        merge_adapter(tmp_path, tmp_path / "out", **options)


def test_the_command(base, tmp_path, monkeypatch, capsys):
    from hf_memopt.cli.app import main

    adapter = save_adapter(base, tmp_path / "adapter", **ALL)
    command = ["hf-memopt", "merge", str(adapter), str(tmp_path / "out"), "--quantize", "nf4", "--json"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ending:
        main()
    found = json.loads(capsys.readouterr().out)
    assert ending.value.code == 0 and found["merged_tensors"] == 14 and found["dequantized"]["quant_type"] == "nf4"


# ---- every value of an adapter's or a base's JSON, replaced by each wrong one


def test_an_adapters_wrong_value_is_named(tmp_path):
    llama().save_pretrained(tmp_path / "base")
    file = save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"]) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": "4"}))
    with pytest.raises(InputError, match="r='4' must be a whole number"):
        merge_adapter(tmp_path / "adapter", tmp_path / "out")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 4, "lora_alpha": 0.5}))
    merge_adapter(tmp_path / "adapter", tmp_path / "out")  # peft takes it, though its annotation does not


@pytest.mark.slow
@pytest.mark.parametrize("number", [60, pytest.param(1000, marks=pytest.mark.sweep)])
@pytest.mark.parametrize("changed", ["adapter/adapter_config.json", "base/config.json", "base/index"])
def test_merge_takes_or_refuses_any_value(changed, number, tmp_path):
    llama().save_pretrained(tmp_path / "base", max_shard_size="20KB")
    save_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["q_proj"], rank_pattern={"q_proj": 2})
    file = tmp_path / changed.replace("index", "model.safetensors.index.json")
    for content in contents(file, number, number):
        file.write_text(json.dumps(content))
        with one_sentence():
            merge_adapter(tmp_path / "adapter", tmp_path / "out", base=tmp_path / "base")
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
