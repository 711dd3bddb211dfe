"""Files as others publish them: doctor refuses those that accelerate or DeepSpeed refuses, and no others."""

import json
import re
import sys
from pathlib import Path

import pytest
from conftest import run
from library_verdicts import accelerate_verdicts, deepspeed_verdicts

from hf_memopt.compatibility.config_files import check_config_file, examine_files, find_faults
from hf_memopt.errors import InputError

FOLDER = Path(__file__).parents[1] / "configs"


def published(name):
    """The files of a table: title -> what is right of it, and its text."""
    parts = re.split(r"^#### (.*): (.*)\n", (FOLDER / name).read_text(), flags=re.MULTILINE)[1:]
    return {title: (right, text) for title, right, text in zip(*[iter(parts)] * 3, strict=True)}


ASKED = published("cases.txt")
ACCELERATE = published("accelerate.txt") | {title: file for title, file in ASKED.items() if title.endswith(".yaml")}
DEEPSPEED = published("deepspeed.txt") | {title: file for title, file in ASKED.items() if title.endswith(".json")}


def written(files, ending, folder):
    paths = {}
    for number, (title, (_, text)) in enumerate(files.items()):
        paths[title] = folder / f"{number}{ending}"
        paths[title].write_text(text)
    return paths


def judged(files):
    return {title: file for title, file in files.items() if not file[0].startswith("unreadable")}


def refusal(examined):
    return "; ".join(fault.text for fault in examined.faults if fault.refused) or None


def test_there_are_enough_files():
    assert len(ACCELERATE) >= 60 and len(DEEPSPEED) >= 60


@pytest.mark.slow
def test_accelerate_files_get_accelerates_verdict(tmp_path):
    paths = written(ACCELERATE, ".yaml", tmp_path)
    verdicts = accelerate_verdicts(paths[title] for title in judged(ACCELERATE))
    examined = examine_files(paths.values())
    assert_right(ACCELERATE, {title: (examined[str(path)], verdicts.get(path)) for title, path in paths.items()})


def test_deepspeed_files_get_deepspeeds_verdict(tmp_path):
    paths = written(DEEPSPEED, ".json", tmp_path)
    titles = list(judged(DEEPSPEED))
    verdicts = dict(zip(titles, deepspeed_verdicts(json.loads(DEEPSPEED[title][1]) for title in titles), strict=True))
    examined = examine_files(paths.values())
    assert_right(DEEPSPEED, {title: (examined[str(path)], verdicts.get(title)) for title, path in paths.items()})


def assert_right(files, answers):
    """Every answer of doctor is what is right of the file, and refuses where the library does."""
    wrong = []
    for title, (right, _) in files.items():
        examined, verdict = answers[title]
        said = [fault.text for fault in examined.faults] or examined.notes
        if not is_right(right, examined, verdict, said):
            wrong.append(f"{title}: {right}: doctor says {said}, the library {verdict}")
    assert not wrong, "\n".join(wrong)


def is_right(right, examined, verdict, said):
    """What is right is valid, unreadable, refused, accepted (a fault too) or noted, and words of the text."""
    effect, _, words = right.partition(" ")
    if effect == "unreadable":
        return len(said) == 1 and words in said[0]
    return (
        (refusal(examined) is None) == (verdict is None)
        and (effect == "refused") == (verdict is not None)
        and bool(examined.faults) == (effect in ("refused", "accepted"))
        and words in " ".join(said)
        and all(fault.line for fault in examined.faults if "neither train_batch_size" not in fault.text)
        and not any("please report" in text or "\n" in text for text in said)
    )


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("axolotl", "base_model: Qwen/Qwen3-4B\nadapter: lora\nsequence_len: 2048\ndeepspeed: zero2.json\n"),
        ("LLaMA-Factory", "model_name_or_path: Qwen/Qwen3-4B\nstage: sft\nfinetuning_type: lora\nbf16: true\n"),
        ("LLaMA-Factory's v1 trainer", "model: Qwen/Qwen3-4B\nmodel_class: llm\ndist_config: {name: fsdp2}\n"),
        ("ms-swift", "model: Qwen/Qwen3-4B\ntrain_type: lora\ntorch_dtype: bfloat16\ndeepspeed: zero2\n"),
        ("torchtune", "tokenizer:\n  _component_: torchtune.models.qwen3.qwen3_tokenizer\nepochs: 1\n"),
        ("TRL", "model_name_or_path: Qwen/Qwen3-4B\ndataset_name: trl-lib/Capybara\nlearning_rate: 1.0e-5\n"),
    ],
)
def test_another_tools_file_is_named_in_one_sentence(tool, text, tmp_path):
    (tmp_path / "a.yaml").write_text(text)
    examined = examine_files([tmp_path / "a.yaml"])[str(tmp_path / "a.yaml")]
    assert [fault.text for fault in examined.faults] == [f"is a configuration of {tool}, not of accelerate"]


def test_an_unknown_tools_file_is_one_sentence_too(tmp_path):
    (tmp_path / "a.yaml").write_text("repos: []\nfail_fast: true\nname: x\n")
    faults = examine_files([tmp_path / "a.yaml"])[str(tmp_path / "a.yaml")].faults
    assert [fault.text for fault in faults] == [
        "sets nothing that accelerate knows: it is no configuration of accelerate"
    ]


def test_without_deepspeed_the_rest_is_checked_and_the_answer_says_so(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    (tmp_path / "good.json").write_text('{"train_batch_size": 8, "amp": {}, "zero_optimization": {"stage": 2}}')
    (tmp_path / "bad.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 9}}')
    good, bad = examine_files([tmp_path / "good.json", tmp_path / "bad.json"]).values()
    assert not good.faults and "its own check was left out" in good.notes[0]
    assert [fault.text for fault in bad.faults] == ["zero_optimization.stage=9 must be 0, 1, 2 or 3"]


@pytest.mark.slow
def test_json_is_printed_alone(tmp_path):
    (tmp_path / "a.json").write_text('{\n "train_batch_size": 8,\n "amp": {}\n}')
    done = run("hf-memopt", "doctor", tmp_path / "a.json", "--json")
    (fault,) = json.loads(done.stdout)["faults"]
    assert done.returncode == 2 and fault["line"] == 3 and "Apex AMP integration has been removed" in fault["message"]


def test_the_processes_of_a_launch_are_those_of_its_command_line(tmp_path):
    text = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
    path = tmp_path / "a.yaml"
    path.write_text(f"{text}parallelism_config: {{parallelism_config_dp_shard_size: 4}}\n")
    assert check_config_file(path, processes=4) == "accelerate"
    with pytest.raises(InputError, match=r"line 4: .*total_size .4. does not match num_processes .8."):
        check_config_file(path)


@pytest.mark.slow
def test_a_running_jobs_state_is_not_asked(tmp_path):
    """Of a job that accelerate has started already, the file is asked anew."""
    text = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: FULL}\n"
    (tmp_path / "a.yaml").write_text(text.replace("fsdp_version: 2", "fsdp_version: 1"))
    (tmp_path / "b.yaml").write_text(text)
    script = f"""
import os
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
from torch import distributed
distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
from accelerate import Accelerator
Accelerator(cpu=True)
from hf_memopt.compatibility.config_files import find_faults
print(*[fault.text for name in "ab" for fault in find_faults("{tmp_path}/" + name + ".yaml")], sep="\\n", flush=True)
os._exit(0)
"""
    said = run(sys.executable, "-c", script).stdout.splitlines()
    assert len(said) == 1 and said[0].startswith("fsdp_config.fsdp_sharding_strategy='FULL' is unknown"), said


def test_a_file_with_several_faults_is_refused_with_the_first(tmp_path):
    path = tmp_path / "zero.json"
    whole = '"train_micro_batch_size_per_gpu": "auto"'
    for content in (f'{{{whole}, "fp16": 1}}', f'{{{whole}, "fp16": 1, "bf16": 1}}', '{"fp16": 1, "bf16": 1}'):
        path.write_text(content)
        first, *others = find_faults(path)
        more = f" ({len(others)} more: hf-memopt doctor {path})" if others else ""
        with pytest.raises(InputError) as refused:
            check_config_file(path)
        assert str(refused.value) == f"{first}{more}"
    assert len(others) > 1
