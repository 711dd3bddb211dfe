"""Files that accelerate itself writes have no fault: its questionnaires are answered at random."""

import importlib
import json
import random

import pytest
import yaml
from conftest import ROOT

from hf_memopt.cli.doctor import check_files
from hf_memopt.compatibility.config_files import check_config_file, examine_files, find_faults

# runs, and types that they come to among others
QUESTIONNAIRES = {
    "cluster": (400, {"NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA"}),
    "sagemaker": (40, {"NO", "DATA_PARALLEL"}),
}
TYPED = ("yes", "no", "", "2", "0.5", str(ROOT / "accelerate_configs" / "deepspeed" / "zero3.json"))


def _answer(draw, text, convert_value=None, default=None):
    """What a person may type: any of TYPED that the question takes."""
    for typed in draw.sample(TYPED, len(TYPED)) if "[yes/NO]" not in text else draw.sample(TYPED[:3], 3):
        if not typed and default is not None:
            return default
        try:
            return convert_value(typed) if convert_value else typed
        except (ValueError, KeyError):
            continue
    raise AssertionError("a question that takes none of TYPED")


def _written(name, seed, monkeypatch):
    """The configuration that one run of `accelerate config` makes; None where it refuses the answers."""
    module, draw = importlib.import_module(f"accelerate.commands.config.{name}"), random.Random(seed)

    def options(text, options, convert_value=None, default=0):
        picked = draw.randrange(len(options))
        return convert_value(picked) if convert_value else picked

    def field(text, convert_value=None, default=None, error_message=None):
        if "json DeepSpeed config" in text:
            return TYPED[-1]
        return _answer(draw, text, convert_value, default)

    monkeypatch.setattr(module, "_ask_options", options)
    monkeypatch.setattr(module, "_ask_field", field)
    for check in vars(module):
        if check.startswith("is_") and check.endswith("_available"):
            monkeypatch.setattr(module, check, lambda: True)
    if name == "cluster":
        monkeypatch.setattr(module, "is_mps_available", lambda: seed % 8 == 0)  # it has no engines
    if name == "sagemaker":
        monkeypatch.setattr(module, "_create_iam_role_for_sagemaker", lambda name: None)
        for variable in ("AWS_PROFILE", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(variable, "set by the questionnaire")
    try:
        return getattr(module, f"get_{name}_input")()
    except (ValueError, RuntimeError) as error:  # what the questionnaire says of a package or of answers
        return print(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONNAIRES)
def test_what_the_questionnaire_writes_has_no_fault(name, tmp_path, monkeypatch, capsys):
    from accelerate.commands.config.config_args import load_config_from_file

    engines, keys, paths = set(), set(), []
    runs, expected = QUESTIONNAIRES[name]
    for seed in range(runs):
        if (config := _written(name, seed, monkeypatch)) is None:
            continue
        path = tmp_path / f"{seed}.{('yaml', 'json')[seed % 2]}"
        config.to_json_file(path) if seed % 2 else config.to_yaml_file(path)
        content = yaml.safe_load(path.read_text())
        engines.add(content["distributed_type"])
        keys |= content.keys()
        try:
            load_config_from_file(str(path))
        except ValueError:  # accelerate 1.15 adds num_processes to SageMaker's, whose class has no such field
            assert name == "sagemaker" and find_faults(path)
            continue
        paths.append(path)
    faults = {fault: path for path, file in examine_files(paths).items() for fault in file.faults}
    wrong = {fault.text: path for fault, path in faults.items() if not fault.refused}
    assert not wrong, "\n".join(wrong)
    assert engines >= expected and "dynamo_config" in keys


@pytest.mark.parametrize("precision", ["no", "fp16", "bf16", "fp8"])
@pytest.mark.parametrize("name", ["default_config.yaml", "default_config.json"])
def test_what_accelerate_config_default_writes_has_no_fault(precision, name, tmp_path):
    from accelerate.utils import write_basic_config

    write_basic_config(precision, str(tmp_path / name))
    assert check_config_file(tmp_path / name) == "accelerate"


def test_doctor_names_the_kind_of_a_json_by_what_it_holds(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps({"distributed_type": "NO", "downcast_bf16": "no"}))
    assert check_files([str(tmp_path / "a.json")], as_json=False) == 0
    assert "a valid accelerate configuration" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["use_cpu", "debug", "tpu_use_cluster"])
def test_an_answer_that_accelerate_would_read_as_true_is_a_fault(key, tmp_path):
    (tmp_path / "a.yaml").write_text(f"distributed_type: 'NO'\n{key}: 'no'\n")
    assert [str(fault) for fault in find_faults(tmp_path / "a.yaml")] == [
        f"{tmp_path / 'a.yaml'}: line 2: {key}='no' must be true or false"
    ]
    (tmp_path / "a.yaml").write_text("distributed_type: 'NO'\ndowncast_bf16: never\n")
    assert len(find_faults(tmp_path / "a.yaml")) == 1


def test_keys_that_accelerate_writes_and_does_not_read_are_said(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("distributed_type: 'NO'\nfp8_config: {backend: TE, amax_history_length: 64}\n")
    assert find_faults(path) == []
    assert "accelerate reads amax_history_len: rename" in examine_files([path])[str(path)].notes[0]
