"""What a model, a tool or a recipe chooses by itself is chosen: no question needs a --set before it is answered."""

import json
import random
import re

import pytest
import torch
from conftest import drawn_by, slow
from peft import LoraConfig

from hf_memopt.estimator.architectures import hub_id, list_architectures, load_config
from hf_memopt.estimator.quantized_checkpoints import dequantized
from hf_memopt.estimator.spec_job import sample_length
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.adapters import by_names

CAUSAL = [name for name in list_architectures() if infer_task(load_config(name)) == "causal-lm"]
SMALLEST = {
    "axolotl.yaml": "base_model: {model}\nadapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\n"
    "sequence_len: 64\nmicro_batch_size: 1\ndatasets:\n  - path: tatsu-lab/alpaca\n    type: alpaca\n",
    "llama_factory.yaml": "model_name_or_path: {model}\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
    "dataset: alpaca_en_demo\ntemplate: default\ncutoff_len: 64\noutput_dir: out\nbf16: true\n",
    "swift.sh": "swift sft --model {model} --dataset AI-ModelScope/alpaca-gpt4-data-en --max_length 64\n",
    "trl.yaml": "model_name_or_path: {model}\ndataset_name: trl-lib/Capybara\nuse_peft: true\n"
    "lora_target_modules: all-linear\nmax_length: 64\noutput_dir: out\n",
}


def _answered(command, *words) -> dict:
    code, out, errors = command(*words, "--json")
    assert code in (0, 1), errors
    return json.loads(out)


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize("tool", SMALLEST)
def test_gpt_oss_trains_dequantized_and_with_its_own_attention(tool, command, tmp_path):
    """Its checkpoint is mxfp4, which transformers does not train, and it has no sdpa."""
    file = tmp_path / tool
    file.write_text(SMALLEST[tool].format(model="openai/gpt-oss-20b"))
    found = _answered(command, "estimate", file, "--hardware", "h200")
    assert found["breakdown"]["parameters"] > 2 * 20e9 and ", eager, " in found["estimated"]
    assert any("mxfp4 weights are dequantized" in note for note in found["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", slow("full")])
def test_an_estimate_of_it_needs_no_more_words(method, command):
    found = _answered(command, "estimate", "gpt-oss-20b", "--hardware", "h200", "--method", method, "--seq-len", "64")
    assert ", eager, " in found["estimated"] and found["method"] == method


@pytest.mark.slow
@pytest.mark.parametrize("model", CAUSAL)
def test_the_smallest_file_of_a_tool_is_answered(model, command, tmp_path):
    """Each commit draws other tools."""
    tool = random.Random(f"{drawn_by()} {model}").choice(list(SMALLEST))
    file = tmp_path / tool
    file.write_text(SMALLEST[tool].format(model=hub_id(model)))
    code, _, errors = command("estimate", file, "--hardware", "h200x8", "--json")
    refused = re.search(
        "ParamWrapper does not work with lora_dropout|adapters train experts that are quantized", errors
    )
    # peft adapts fused experts for all-linear, which TRL hands on, and for names that dense layers have, too.
    assert (tool == "trl.yaml" or model == "deepseek-v3") if refused else code in (0, 1), errors


# Weights of adapters of rank 8 at q, k, v and o.
ATTENTION_OF_30B_A3B = 48 * 8 * (2 * (2048 + 4096) + 2 * (2048 + 512))


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("tool", [tool for tool in SMALLEST if tool != "trl.yaml"])
def test_experts_that_are_no_linear_layers_have_no_adapters(tool, command, tmp_path):
    """Each of the tools searches for linear modules; q, k, v and o of Qwen3-30B-A3B are all that it has."""
    file = tmp_path / tool
    file.write_text(SMALLEST[tool].format(model="Qwen/Qwen3-30B-A3B"))
    found = _answered(command, "estimate", file, "--hardware", "h200", "--set", "optim=adamw_torch")
    assert found["breakdown"]["optimizer_states"] == pytest.approx(2 * 4 * ATTENTION_OF_30B_A3B, rel=0.01)


@pytest.mark.slow
def test_nor_have_they_where_trl_adds_the_adapters(command, tmp_path):
    file = tmp_path / "llama_factory.yaml"
    file.write_text(
        SMALLEST[file.name].format(model="Qwen/Qwen3-30B-A3B").replace("stage: sft", "stage: dpo") + "pref_beta: 0.1\n"
    )
    found = _answered(command, "estimate", file, "--hardware", "h200", "--set", "optim=adamw_torch")
    assert found["breakdown"]["optimizer_states"] == pytest.approx(2 * 4 * ATTENTION_OF_30B_A3B, rel=0.01)


def test_numbered_layers_are_adapted_by_their_paths():
    """Qwen2.5-VL's merger is a Sequential, and a 0 is the first decoder layer, too."""
    model = torch.nn.Module()
    model.merger = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.GELU(), torch.nn.Linear(2, 2))
    model.q_proj, model.lm_head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    named = by_names(LoraConfig(target_modules="all-linear", target_parameters=[]), model)
    assert named.target_modules == {"merger.0", "merger.2", "q_proj"}


@pytest.mark.slow
@pytest.mark.parametrize("model", list_architectures())
def test_every_bundled_model_is_estimated(model, command):
    """Each commit draws other cards and methods."""
    drawn = random.Random(f"{drawn_by()} {model}")
    card, method = (
        drawn.choice(["rtx_4090", "a100_80gb", "mi300x", "apple_m4_max_64gb", "t4"]),
        drawn.choice(["full", "lora"]),
    )
    _answered(command, "estimate", model, "--hardware", card, "--method", method, "--seq-len", "64")


@pytest.mark.parametrize("asked", ["estimate", "plan"])
@pytest.mark.parametrize("model", sorted(name for name in list_architectures() if dequantized(load_config(name))))
def test_what_cannot_be_loaded_in_4_bits_says_what_trains_instead(model, asked, command):
    """from_pretrained takes no BitsAndBytesConfig for a checkpoint that has a quantization of its own."""
    code, _, errors = command(asked, model, "--hardware", "h100_80gb", "--method", "qlora", "--seq-len", 64)
    assert code == 2
    assert "use method=lora or full, which load it with Mxfp4Config(dequantize=True), or for qlora a copy" in errors


def test_a_sample_holds_a_prompt_and_the_longest_completion(subtests):
    for task, asked, tokens in [
        ("grpo", {}, 1024),  # 512 of a prompt fit beside TRL's 512
        ("grpo", {"training": {"max_completion_length": 512}}, 1024),
        ("grpo", {"training": {"max_completion_length": 513}}, 1025),
        ("rloo", {"training": {"max_completion_length": 2048}}, 2560),
        ("grpo", {"training": {"max_completion_length": 40_000}}, 40_512),
        ("grpo", {"training": {"max_completion_length": 2048}, "seq_len": 3000}, 3000),
        ("sft", {"training": {"max_completion_length": 2048}}, 1024),
        (None, {}, 1024),
    ]:
        with subtests.test(f"{task} {asked} {tokens}"):
            spec = JobSpec(model="qwen3-0.6b", config=load_config("qwen3-0.6b"), task=task, **asked)
            assert sample_length(spec, 1024) == tokens


def test_a_sample_is_no_longer_than_the_models_positions():
    spec = JobSpec(model="gpt2", config=load_config("gpt2"), task="grpo", training={"max_completion_length": 800})
    assert sample_length(spec, 512) == 1024
