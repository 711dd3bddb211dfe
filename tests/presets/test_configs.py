"""Every shipped YAML and JSON is parsed by the library that it is for, found by glob."""

import json
import os

import pytest
import yaml
from conftest import ROOT

from hf_memopt.compatibility import check_config_file
from hf_memopt.engines import DeepSpeed
from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset, list_presets, strategies
from hf_memopt.presets.shipped_configs import _comment, config_name, shipped_configs, yaml_text

YAMLS = sorted((ROOT / "accelerate_configs").rglob("*.yaml"))
JSONS = sorted((ROOT / "accelerate_configs").rglob("*.json"))


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)  # accelerate resolves deepspeed_config_file against the working directory


def test_there_is_something_to_test():
    assert len(YAMLS) >= 30 and len(JSONS) == 7


@pytest.mark.drawn(5)
@pytest.mark.parametrize("path", YAMLS, ids=lambda path: path.name)
def test_yaml_is_what_accelerate_reads(path):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    assert check_config_file(path) == "accelerate"
    assert load_config_from_file(str(path)).num_processes >= 1
    # The launcher's own reading: every nested key of ours arrives as the option that workers are told.
    parsed = launch_command_parser().parse_args(["--config_file", str(path), "script.py"])
    options, _, _ = _validate_launch_command(parsed)
    content = yaml.safe_load(path.read_text())
    for section in ("fsdp_config", "deepspeed_config"):
        for key, value in content.get(section, {}).items():
            assert getattr(options, key) == value
    assert options.num_processes == content["num_processes"]


@pytest.mark.kept
@pytest.mark.slow
def test_yaml_agrees_with_the_presets(subtests):
    for path in YAMLS:
        with subtests.test(path=path):
            assert path.read_text() == shipped_configs()[path.name], "run make configs"


def test_no_yaml_is_missing():
    assert {path.name for path in YAMLS} == set(shipped_configs())


def test_every_preset_has_a_yaml_to_launch_with(subtests):
    for name in list_presets():
        with subtests.test(name=name):
            for method in ("full", "lora", "qlora"):
                preset = get_preset(name, method)
                text = (ROOT / "accelerate_configs" / config_name(preset)).read_text()
                assert text == yaml_text(preset.accelerate_config(), _comment(preset)), "run make configs"


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.name)
def test_json_is_what_deepspeed_reads(path):
    """DeepSpeed's own class reads it after transformers filled the "auto" values, as in a run on eight ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers import LlamaConfig, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    assert check_config_file(path) == "deepspeed"
    content = json.loads(path.read_text())
    assert "optimizer" not in content and "scheduler" not in content, "they would override optim and the scheduler"
    args = TrainingArguments(output_dir="unused", use_cpu=True, bf16=True, gradient_accumulation_steps=4)
    filled = HfTrainerDeepSpeedConfig(content)
    filled.trainer_config_process(args)
    model = type("Model", (), {"config": LlamaConfig(hidden_size=256)})()
    filled.trainer_config_finalize(args, model, num_training_steps=10)
    assert '"auto"' not in json.dumps(filled.config)
    read = DeepSpeedConfig(filled.config)
    assert read.gradient_accumulation_steps == 4 and read.bfloat16_config.enabled
    assert read.zero_config.stage == content["zero_optimization"]["stage"]
    assert DeepSpeed.of_config(content).strategy == path.stem


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.name)
def test_json_is_what_presets_give(path):
    assert path.stem in strategies()
    assert get_preset("a100_80gb_x8", strategy=path.stem).deepspeed_config() == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_versio: 2\n", "did you mean 'fsdp_version'"),
        (
            "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  reshard_after_foward: true\n",
            "did you mean 'reshard_after_forward'",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  zero_stagee: 2\n",
            "did you mean 'zero_stage'",
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config:\n  tp_size: 8\n",
            "did you mean 'parallelism_config_tp_size'",
        ),
        ("distributed_type: 'NO'\nnum_process: 1\n", "num_process"),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\ndeepspeed_config:\n"
            "  deepspeed_config_file: accelerate_configs/deepspeed/zero2.json\n",
            "mixed_precision beside",
        ),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n  deepspeed_config_file: gone.json\n",
            "gone.json: no such file",
        ),
        ("just a line\n", "holds no settings"),
        ("a: [1\n", "bad.yaml"),
    ],
)
def test_misspelt_yaml_is_one_clear_line(text, message, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        check_config_file(tmp_path / "bad.yaml")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"zero_optimization": {"stage": 3, "stage3_max_live_params": 1}},
            "did you mean 'stage3_max_live_parameters'",
        ),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"devise": "cpu"}}}, "did you mean 'device'"),
        ({"zero_optimisation": {"stage": 2}}, "did you mean 'zero_optimization'"),
    ],
)
def test_misspelt_json_is_one_clear_line(content, message, tmp_path):
    (tmp_path / "bad.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match=message):
        check_config_file(tmp_path / "bad.json")


def test_files_hold_no_noise():
    for path in YAMLS:
        text = path.read_text()
        assert not any(word in text for word in ("tpu", "downcast_bf16", "ipex")), path
        assert f"{os.sep}home" not in text
