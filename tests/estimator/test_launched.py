"""dry-run of scripts that a launcher starts on several devices: the launched job is the predicted job."""

import json
import os
import shutil
import subprocess
import sys
from itertools import product

import pytest
import yaml
from conftest import BIN, ROOT, slow, sweep

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.scripts.dry_run import caught_trainer
from hf_memopt.estimator.scripts.launched import Launched, ScriptCommand, _by_accelerate, as_launched
from hf_memopt.estimator.trainer_job import describe_trainer
from hf_memopt.foreign.launchers import Launch, split_launch

YAML = ROOT / "accelerate_configs"
FSDP = "--use_fsdp --fsdp_version {} --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP"
SCRIPT = """
import torch
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, LlamaConfig, Trainer, TrainingArguments

args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
model = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
row = {"input_ids": torch.ones(16, dtype=torch.long), "labels": torch.ones(16, dtype=torch.long)}
Trainer(model, args, train_dataset=[row] * 64).train()
"""
PRESET = """
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer
from hf_memopt import get_preset

args = get_preset("a100_80gb_x8", method="full", strategy="zero3").training_arguments(output_dir="out")
shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
row = {"input_ids": torch.ones(16, dtype=torch.long), "labels": torch.ones(16, dtype=torch.long)}
Trainer(AutoModelForCausalLM.from_config(LlamaConfig(**shape)), args, train_dataset=[row] * 64).train()
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The job of a command's words, on A100s."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    (tmp_path / "preset.py").write_text(PRESET, encoding="utf-8")
    shutil.copy(YAML / "deepspeed" / "zero3.json", tmp_path)

    def describe(command: str, devices: int | None = None, hardware: str = "a100_80gb"):
        launch, own, (script, *arguments) = split_launch(command.split())
        arguments += ["--output_dir", "out"] * (script == "train.py")
        words = ScriptCommand(script, arguments, launch, own, devices)
        with caught_trainer(words, hardware) as trainer:
            return describe_trainer(trainer, hardware, None, None)

    return describe


def test_a_launchers_words_are_told_from_the_scripts(subtests):
    for command, by, own, script in [
        ("train.py --bf16", None, "", "train.py --bf16"),
        ("python -u train.py --bf16", "python", "-u", "train.py --bf16"),
        ("accelerate launch train.py --a 1", "accelerate", "", "train.py --a 1"),
        (
            *("accelerate launch --config_file x.yaml --multi_gpu train.py", "accelerate"),
            *("--config_file x.yaml --multi_gpu", "train.py"),
        ),
        ("/opt/bin/torchrun --nproc_per_node=8 train.py", "torchrun", "--nproc_per_node=8", "train.py"),
        (
            *("python3.11 -m torch.distributed.run --nproc-per-node 8 train.py", "torchrun", "--nproc-per-node 8"),
            "train.py",
        ),
        (
            *("python -m accelerate.commands.launch --num_processes 2 train.py", "accelerate", "--num_processes 2"),
            "train.py",
        ),
        (
            *("deepspeed --num_gpus 4 train.py --deepspeed z.json", "deepspeed", "--num_gpus 4"),
            "train.py --deepspeed z.json",
        ),
    ]:
        with subtests.test(f"{command} {by} {own} {script}"):
            launch, words, rest = split_launch(command.split())
            assert (launch and launch.by, " ".join(words), " ".join(rest)) == (by, own, script)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("command", "devices", "strategy", "processes"),
    [
        ("train.py --deepspeed zero3.json", 8, "zero3", 8),
        slow("train.py", 8, "ddp", 8),
        slow("train.py --fsdp full_shard", 4, "fsdp2", 4),
        slow("torchrun --nproc_per_node 4 train.py --fsdp full_shard", None, "fsdp2", 4),
        slow("torchrun --nnodes 2 --nproc_per_node 8 train.py", None, "ddp", 16),
        slow("deepspeed --num_gpus 2 train.py --deepspeed zero3.json", None, "zero3", 2),
        (f"accelerate launch --num_processes 2 {FSDP.format(2)} train.py", None, "fsdp2", 2),
        slow(f"accelerate launch --num_processes 2 {FSDP.format(1)} train.py", None, "fsdp2", 2),
        slow("accelerate launch --num_processes 4 --multi_gpu train.py", None, "ddp", 4),
        slow("accelerate launch --num_processes 2 --use_deepspeed --zero_stage 2 train.py", None, "zero2", 2),
        slow(f"accelerate launch --config_file {YAML}/a100_80gb_x8_zero2.yaml train.py --bf16", None, "zero2", 8),
        slow(f"accelerate launch --config_file {YAML}/a100_80gb_x8_fsdp2.yaml train.py --bf16", 8, "fsdp2", 8),
        slow(f"accelerate launch --config_file {YAML}/a100_80gb_x8_zero3.yaml preset.py", None, "zero3", 8),
        slow("accelerate launch --num_processes 1 train.py", None, "none", 1),
    ],
)
def test_the_engine_that_is_launched_is_predicted(job, command, devices, strategy, processes):
    described = job(command, devices)
    assert (described.engine.strategy, described.world_size) == (strategy, processes)
    micro = 1 if "preset" in command else 8
    assert described.fields["per_device_train_batch_size"] == micro
    if described.engine.deepspeed:
        accumulation = described.fields["gradient_accumulation_steps"]
        assert described.engine.deepspeed["train_batch_size"] == micro * accumulation * processes


def test_processes_that_would_each_train_alone_are_refused(job):
    """What TrainingArguments make of two CPU processes without use_cpu."""
    command = f"accelerate launch --config_file {YAML}/cpu_x2.yaml train.py"
    with pytest.raises(InputError, match=r"starts 2 processes, .* each would train alone: .* --use_cpu"):
        job(command, hardware="cpu")
    assert job(f"{command} --use_cpu", hardware="cpu").world_size == 2


@pytest.mark.parametrize(
    ("command", "devices", "message"),
    [
        ("preset.py", 1, "a100_80gb_x8 is for 8 devices, and this dry run has one: add --hardware a100_80gb_x8"),
        ("preset.py", 8, "has strategy=zero3, which `accelerate launch` starts, and here ddp is launched"),
        ("accelerate launch --num_processes 8 --multi_gpu train.py", 4, "accelerate starts 8 process(es)"),
        ("accelerate launch --config_file gone.yaml train.py", None, "`gone.yaml` does not exist"),
        ("accelerate launch --no_such_option=1 train.py", None, "is refused by its own parser"),
        ("torchrun --nproc_per_node 8 train.py", 4, "torchrun starts 8 process(es)"),
        ("torchrun --nproc_per_node many train.py", None, "nproc_per_node='many' is no number of processes"),
        ("accelerate launch", None, "names no script"),
    ],
)
def test_another_job_is_refused(job, command, devices, message):
    with pytest.raises(InputError) as refused:
        job(command, devices)
    assert message in str(refused.value)


def test_a_command_is_taken_as_one(command, tmp_path, monkeypatch):
    """Options before the launcher are dry-run's, those after it the launcher's and the script's."""
    from hf_memopt.cli import estimate

    asked = []
    monkeypatch.setattr(estimate, "run_dry_run", lambda options, *others: asked.append(options))
    command(
        "dry-run", "--hardware", "a100_80gb", "accelerate", "launch", "--num_processes", 2, "t.py", "--hardware", "x"
    )
    command("dry-run", "t.py", "--hardware", "a100_80gb_x8", "--config_file", "z.yaml", "--", "--bf16")
    one, two = asked
    assert (one.hardware, one.launcher_words, one.script, one.arguments) == (
        *("a100_80gb", ["--num_processes", "2"], "t.py", ["--hardware", "x"]),
    )
    assert (two.launch.by, two.launcher_words, two.arguments) == (
        "accelerate",
        ["--config_file", "z.yaml"],
        ["--bf16"],
    )


def test_nothing_of_a_launch_stays(monkeypatch):
    from torch import distributed

    before = dict(os.environ)
    with as_launched(Launched(processes=4, environment={"ACCELERATE_USE_FSDP": "true"})):
        assert distributed.get_world_size() == 4 and os.environ["WORLD_SIZE"] == "4"
        assert os.environ["ACCELERATE_USE_FSDP"] == "true"
    assert not distributed.is_initialized() and dict(os.environ) == before


@pytest.mark.engines
@pytest.mark.parametrize("name", ["cpu_x2", "cpu_x2_zero2", "cpu_x2_zero3"])
def test_the_environment_is_accelerates_own(name, tmp_path, monkeypatch):
    """What `accelerate launch` really starts a script with."""
    script = tmp_path / "show.py"
    script.write_text(
        "import json, os, sys\njson.dump(dict(os.environ), open(f'{sys.argv[1]}/{os.environ[\"RANK\"]}.json', 'w'))\n"
    )
    file = YAML / f"{name}.yaml"
    done = subprocess.run(
        [BIN / "accelerate", "launch", "--config_file", file, script, tmp_path], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    real = json.loads((tmp_path / "0.json").read_text())
    launched = _by_accelerate(["--config_file", str(file), str(script)], None)
    assert launched.processes == int(real["WORLD_SIZE"]) == 2
    ours = {**launched.environment, **launched.variables}
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    names = {key for key in {*real, *ours} if key.startswith(prefixes)}
    assert {key: ours.get(key) for key in names} == {key: real.get(key) for key in names}


# ---- scripts of others: engine × script × the way it is asked for

ENGINES = {
    **{"ddp": "--num_processes 2 --multi_gpu", "fsdp1": f"--num_processes 2 {FSDP.format(1)}"},
    **{"fsdp2": f"--num_processes 2 {FSDP.format(2)}", "zero2": "--num_processes 2 --use_deepspeed --zero_stage 2"},
    "zero3": "--num_processes 2 --use_deepspeed --zero_stage 3",
}
FLAGS = {
    **{"ddp": [], "fsdp1": ["--fsdp", "full_shard auto_wrap", "--fsdp_config", '{"version": 1}']},
    **{"fsdp2": ["--fsdp", "full_shard auto_wrap"], "zero2": ["--deepspeed", f"{YAML}/deepspeed/zero2.json"]},
    "zero3": ["--deepspeed", f"{YAML}/deepspeed/zero3.json"],
}
WRAPPED = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
FILES = {
    "ddp": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1, **WRAPPED}},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, **WRAPPED}},
    "zero2": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 2}},
    "zero3": {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}},
}
SCRIPTS = ("run_clm", "run_glue", "trl_sft", "trl_dpo_lora", "run_image_classification", "peft_lora_classification")
NO_FLAGS = ("trl_dpo_lora", "peft_lora_classification")  # which take none on their command lines
MICRO_BATCHES = {"run_clm": 4, "run_glue": 8, "trl_sft": 4, "trl_dpo_lora": 2, "peft_lora_classification": 16}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with the small models and data that the scripts' own commands name."""
    import script_inputs

    folder = tmp_path_factory.mktemp("inputs")
    script_inputs.main(folder)
    return folder


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import estimator_scripts

    return estimator_scripts


def asked(way: str, engine: str, script, arguments: list[str], folder) -> ScriptCommand:
    """The command of a script whose engine is named by its own flags, by accelerate's options or its file."""
    if way == "flags":
        return ScriptCommand(str(script), [*arguments, *FLAGS[engine]], devices=2)
    words = ENGINES[engine].split()
    if way == "file":
        file = folder / f"{engine}.yaml"
        file.write_text(yaml.safe_dump({"num_processes": 2, "use_cpu": False, **FILES[engine]}))
        words = ["--config_file", str(file)]
    return ScriptCommand(str(script), arguments, Launch("accelerate"), words)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "engine", "way"),
    [
        case if place % 8 == 0 else sweep(*case)
        for place, case in enumerate(product(SCRIPTS, ENGINES, ("command", "flags", "file")))
        if not (case[0] in NO_FLAGS and case[2] == "flags")
    ],
)
def test_scripts_of_others_under_engines(name, engine, way, inputs, scripts, tmp_path):
    """The engine that is launched, for two devices, with the script's own batch."""
    script = ROOT / "tests" / "scripts" / f"{name}.py"
    command = asked(way, engine, script, scripts.argv(script), tmp_path)

    def launched(script) -> dict:
        with caught_trainer(command, "a100_80gb") as trainer:
            job = describe_trainer(trainer, "a100_80gb", None, None)
            found = {"strategy": job.engine.strategy, "version": fsdp_version(trainer), "devices": job.world_size}
            found["micro"] = job.fields["per_device_train_batch_size"]
            return {**found, "bytes": estimate_job(job).device_bytes}

    answer = scripts.forked(launched, script, inputs).result
    assert answer.pop("bytes") > 0
    version = {"fsdp1": 1, "fsdp2": 2}.get(engine)
    strategy = engine.replace("fsdp1", "fsdp2")
    assert answer == {"strategy": strategy, "version": version, "devices": 2, "micro": MICRO_BATCHES.get(name, 8)}


def fsdp_version(trainer) -> int | None:
    """What accelerate would shard with; None where it does not."""
    plugin = trainer.accelerator.state.fsdp_plugin if trainer.is_fsdp_enabled else None
    return plugin and plugin.fsdp_version


@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("run_clm", "cpu_x2_zero2"),
        sweep("run_clm", "cpu_x2"),
        sweep("run_clm", "cpu_x2_zero3"),
        *(
            sweep(name, file)
            for name in ("run_glue", "trl_sft")
            for file in ("cpu_x2", "cpu_x2_zero2", "cpu_x2_zero3")
        ),
    ],
)
def test_two_real_processes_take_what_is_predicted(name, file, inputs, scripts, tmp_path):
    """Within 1 % on the rank that takes most, by the live tensors of two steps that accelerate started."""
    script = ROOT / "tests" / "scripts" / f"{name}.py"
    words, arguments = ["--config_file", str(YAML / f"{file}.yaml")], [*scripts.argv(script), "--use_cpu"]
    counted = [BIN / "accelerate", "launch", *words, ROOT / "benchmarks" / "launched_rank.py", tmp_path, script]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*counted, *arguments], cwd=inputs, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    measured = [json.loads((tmp_path / f"{rank}.json").read_text())["measured_bytes"] for rank in (0, 1)]

    def predicted(script) -> dict:
        with caught_trainer(ScriptCommand(str(script), arguments, Launch("accelerate"), words), "cpu") as trainer:
            return estimate_job(describe_trainer(trainer, "cpu", None, None)).to_dict()

    estimate = scripts.forked(predicted, script, inputs).result["peak_allocated_bytes"]
    assert estimate == pytest.approx(max(measured), rel=0.01), measured
