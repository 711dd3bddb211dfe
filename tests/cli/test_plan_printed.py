"""What a plan prints, launches and writes to files."""

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from test_plan import config, small_spec
from transformers import AutoConfig

from hf_memopt import InputError, MemoryArguments, plan
from hf_memopt.cli.plan_printed import _alternatives
from hf_memopt.estimator.architectures import hub_id
from hf_memopt.estimator.result import Estimate
from hf_memopt.planner.alternatives import Alternative
from hf_memopt.planner.choices import Choice, memory_arguments
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.launch import has_recipe, launch_command, recipe_name
from hf_memopt.planner.profiles import Plan, Profile
from hf_memopt.planner.settle import _check_memory


def _accelerate_reads(words: list[str]):
    """accelerate's own parser of a launch command."""
    from accelerate.commands.launch import launch_command_parser

    parsed = launch_command_parser().parse_args(words[2:])
    assert parsed.training_script.startswith("recipes/")
    return parsed


@pytest.mark.parametrize(
    ("hardware", "method", "strategy", "flags"),
    [
        ("rtx_4090", "lora", None, {"config_file": "accelerate_configs/rtx_4090.yaml"}),
        ("a100_80gbx8", "lora", "zero3", {"use_deepspeed": True, "num_processes": 8, "zero3_init_flag": "true"}),
        ("rtx_4090x2", "lora", "ddp", {"multi_gpu": True, "num_processes": 2, "mixed_precision": "bf16"}),
        ("rtx_4090x4", "full", "fsdp2", {"use_fsdp": True, "fsdp_version": "2", "num_processes": 4}),
        ("rtx_3090x2", "qlora", "fsdp2_offload_cpu", {"use_fsdp": True, "fsdp_offload_params": "true"}),
        ("h100_80gbx16", "full", "zero3_offload_cpu", {"use_deepspeed": True, "num_machines": 2}),
    ],
)
def test_the_launch_command_is_what_accelerate_and_the_recipe_read(hardware, method, strategy, flags, monkeypatch):
    from hf_memopt.recipe.recipe_arguments import parse

    monkeypatch.setenv("MACHINE_RANK", "1")
    monkeypatch.setenv("MAIN_PROCESS_IP", "10.0.0.1")
    preset = resolve_preset(hardware, method, strategy)
    choice = Choice(
        preset.strategy,
        1,
        64 // preset.processes,
        1.0,
        "adamw_torch",
        preset.dtype,
        knobs=frozenset({"loss_chunk_size"}),
    )
    spec = small_spec(preset)
    memory_args = memory_arguments(MemoryArguments(memory_profile="aggressive"), choice)
    profile = Profile("maximum", 0.94, choice, choice.configured(preset), memory_args, None, 1.0, 1.0)
    words = shlex.split(os.path.expandvars(launch_command(spec, profile)))
    read = _accelerate_reads(words)
    for name, value in flags.items():
        assert getattr(read, name) == value, name
    parsed = parse(read.training_script_args)
    assert parsed.recipe.method == method and parsed.recipe.effective_batch_size == 64
    assert parsed.recipe.model_name_or_path == "HuggingFaceTB/SmolLM2-135M" == hub_id("smollm2-135m")
    assert parsed.recipe.dataset_name == "YOUR_DATA.jsonl"  # a placeholder: no model trains on built-in questions
    assert parsed.training["per_device_train_batch_size"] == profile.choice.micro_batch
    assert parsed.memory.levers() == profile.memory_args.levers()
    assert (
        bool(parsed.training.get("activation_checkpointing"))
        == bool(profile.choice.checkpointed and not profile.choice.engine.fsdp_version)
        or not profile.choice.checkpointed
    )


@pytest.mark.parametrize(
    ("hardware", "method", "strategy"), [("rtx_4090", "lora", None), ("a100_80gbx8", "lora", "zero3")]
)
def test_the_launch_command_works_from_another_folder(hardware, method, strategy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    preset = resolve_preset(hardware, method, strategy)
    choice = Choice(preset.strategy, 1, 64 // preset.processes, 1.0, "adamw_torch", preset.dtype)
    spec = small_spec(preset)
    profile = Profile("safe", 0.85, choice, choice.configured(preset), MemoryArguments(), None, 1.0, 1.0)
    named = [word for word in shlex.split(launch_command(spec, profile)) if word.endswith((".py", ".json", ".yaml"))]
    assert len(named) == 2 and all(Path(name).is_file() for name in named)


def test_files_for_several_machines(tmp_path):
    from hf_memopt.planner.launch import write_files

    preset = resolve_preset("h100_80gbx16", "full", "zero3_offload_cpu")
    choice = Choice(preset.strategy, 1, 4, 1.0, "adamw_torch", preset.dtype)
    spec = small_spec(preset)
    profile = Profile("safe", 0.85, choice, choice.configured(preset), MemoryArguments(), _ANY_ESTIMATE, 1.0, 1.0)
    written = {Path(file).name for file in write_files(spec, profile, str(tmp_path))}
    assert {"accelerate.yaml", "deepspeed.json", "launch.sh", "slurm.sbatch"} <= written
    config = yaml.safe_load((tmp_path / "accelerate.yaml").read_text())
    assert (config["num_machines"], config["num_processes"]) == (2, 16)
    assert config["deepspeed_config"]["deepspeed_config_file"] == str(tmp_path / "deepspeed.json")
    for script in ("launch.sh", "slurm.sbatch"):
        assert subprocess.run(["bash", "-n", tmp_path / script], check=False).returncode == 0
        assert "--effective_batch_size 64" in (tmp_path / script).read_text()


def test_no_secret_is_written_into_files_or_printed(tmp_path, caplog):
    from hf_memopt.planner.launch import write_files

    preset = resolve_preset("rtx_4090", "lora")
    choice = Choice("none", 1, 64, 0.5, preset.training["optim"], preset.dtype)
    fields = {"hub_token": "s3cret", "push_to_hub": True}
    spec = dataclasses.replace(small_spec(preset), training=fields, lora={"token": "s3cret"})
    profile = Profile("safe", 0.85, choice, choice.configured(preset), MemoryArguments(), _ANY_ESTIMATE, 1.0, 1.0)
    files = [Path(file) for file in write_files(spec, profile, str(tmp_path))]
    assert not [file.name for file in files if "s3cret" in file.read_text()]
    assert json.loads((tmp_path / "training_arguments.json").read_text())["push_to_hub"] is True
    assert "s3cret" not in launch_command(spec, profile)
    assert "HF_TOKEN" in caplog.text and "s3cret" not in caplog.text


_ANY_ESTIMATE = Estimate(1, 1, 1, 1, "forward", {}, {}, 2, {}, ())


def test_videos_are_launched_with_their_frames():
    from hf_memopt.recipe.recipe_arguments import parse
    from hf_memopt.recipe.video import VideoArguments
    from hf_memopt.video.inputs import VideoInputs

    preset = resolve_preset("rtx_4090", "lora")
    choice = Choice("none", 1, 64, 0.5, preset.training["optim"], preset.dtype)
    more = {"video": VideoInputs(frames=24, max_pixels_per_frame=50176), "frozen": ("vision",)}
    spec = dataclasses.replace(small_spec(preset), model="qwen2.5-vl-3b", **more)
    memory_args = memory_arguments(MemoryArguments(), choice)
    profile = Profile("safe", 0.85, choice, choice.configured(preset), memory_args, None, 1.0, 1.0)
    words = shlex.split(launch_command(spec, profile))
    parsed = parse(words[words.index("recipes/video_sft.py") + 1 :], own=VideoArguments).recipe
    assert (parsed.max_frames, parsed.max_pixels_per_frame) == (24, 50176)
    assert parsed.freeze_vision and not parsed.freeze_projector


@pytest.mark.slow
def test_json_and_exported_files(command, tmp_path):
    folder = tmp_path / "run"
    (tmp_path / "model").mkdir()
    config(2).save_pretrained(tmp_path / "model")
    code, out, err = command(
        "plan",
        tmp_path / "model",
        "--hardware",
        "cpu",
        "--seq-len",
        128,
        "--memory",
        0.5,
        "--method",
        "lora",
        "--effective-batch-size",
        2,
        "--export",
        folder,
        "--json",
    )
    assert code == 0, err
    made = json.loads(out)
    profile = made["profiles"][1]
    for key in (
        *("training_arguments", "memory_arguments", "model_kwargs", "lora", "launch", "estimate", "relative_speed"),
        "tokens_per_second",
    ):
        assert key in profile
    assert profile["tokens_per_second"] is None and any("bf16_flops of CPU" in note for note in made["notes"])
    assert {"settings", "reason"} <= set((made["rejected"] or [{"settings": "", "reason": ""}])[0])
    assert profile["estimate"]["fits"] and profile["lora"]["r"] == 16
    assert sorted(Path(file).name for file in made["exported"]) == [
        "accelerate.yaml",
        "launch.sh",
        "plan.json",
        "training_arguments.json",
    ]
    settings = json.loads((folder / "training_arguments.json").read_text())
    from transformers import TrainingArguments

    args = TrainingArguments(output_dir=tmp_path, **settings)
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 2
    assert yaml.safe_load((folder / "accelerate.yaml").read_text())["num_processes"] == 1


@pytest.mark.slow
def test_an_exported_plan_trains(command, tmp_path, builtin_model, jsonl):
    """plan --export, then sh launch.sh: from nothing to a trained model."""
    folder = tmp_path / "run"
    binaries = Path(sys.executable).parent
    rows = jsonl([{"text": f"{number}? {number}. " * 40} for number in range(24)])
    code, _, err = command(
        "plan",
        builtin_model,
        "--hardware",
        "cpu",
        "--seq-len",
        64,
        "--memory",
        1,
        "--effective-batch-size",
        8,
        "--method",
        "full",
        "--set",
        "optim=adamw_torch",
        "--export",
        folder,
    )
    assert code == 0, err
    done = subprocess.run(
        ["sh", folder / "launch.sh", "--dataset_name", rows, "--max_steps", "2", "--held_out", "0", "--samples", "0"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{binaries}:{os.environ['PATH']}"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads((folder / "out" / "memory_report.json").read_text())
    assert report["global_step"] == 2
    assert report["estimate"]["training_arguments"]["per_device_train_batch_size"] == 8


@pytest.mark.slow
def test_for_people(command):
    code, out, err = command("plan", "smollm2-135m", "--hardware", "rtx_3060", "--seq-len", 512, "--method", "lora")
    assert code == 0
    assert out.startswith("YES, with lora: smollm2-135m on NVIDIA GeForce RTX 3060 12 GB, 512 tokens\n")
    for word in ("tokens/s", "accelerate launch", "host memory"):
        assert word in out
    assert "…" not in out and "the time of the fastest profile\n" not in out
    assert "tracing" in err and "estimating" in err


@pytest.mark.parametrize(
    ("relative_time", "said"),
    [(0.8, "qlora, faster but with weights in 4 bits: about 5.00 GiB"), (1.1, "qlora: about")],
)
def test_a_faster_method_that_is_not_planned_says_why(relative_time, said):
    usual = Profile("safe", 0.85, None, None, MemoryArguments(), _ANY_ESTIMATE, 1.0, 1.0)
    other = {"settings": "micro-batch 1 × 8", "device_bytes": 5 * 2**30, "estimated": False, "fits": True}
    row = Alternative(method="qlora", **other, relative_time=relative_time, tokens_per_second=100 / relative_time)
    made = Plan(small_spec(resolve_preset("rtx_4090", "lora")), [usual], [], methods=[row])
    assert [text.startswith(said) for text in _alternatives(made)] == [True]


@pytest.mark.slow
def test_nothing_fits_exits_with_1(command, tmp_path):
    config(2).save_pretrained(tmp_path)
    code, out, _ = command(
        "plan", tmp_path, "--hardware", "cpu", "--seq-len", 128, "--memory", "0.001", "--method", "full"
    )
    assert code == 1 and "nothing fits" in out and "GiB missing" in out


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["no-such-model"], "no such folder or hub id"),
        (["gpt2", "--hardware", "rtx_4091"], "Did you mean 'rtx_4090'"),
        (["gpt2", "--hardware", "rtx_4090x0"], "at least 1"),
        (["gpt2", "--method", "dora"], "unknown method 'dora'"),
        (["gpt2", "--profile", "fast"], "unknown profile 'fast'"),
        (["gpt2", "--hardware", "rtx_4090", "--seq-len", "9999"], "from 1 to the model's 1024 positions"),
        (["gpt2", "--hardware", "rtx_4090x3", "--effective-batch-size", "8"], "use a multiple of 3"),
        (["gpt2", "--hardware", "rtx_4090", "--strategy", "zero3"], "say how many, as in rtx_4090x2"),
        (["gpt2", "--hardware", "rtx_4090", "--memory", "-1"], "must be above 0"),
        (["gpt2", "--hardware", "rtx_4090", "--host-memory", "-1"], "must be above 0"),
        (["gpt2", "--set", "quantization.load_in_4bit=true", "--method", "full"], "applies to method=qlora only"),
        (["gpt2", "--set", "lora.r=4", "--method", "full"], "applies to method=lora only"),
        (["gpt2", "--set", "no_such_field=1", "--hardware", "cpu"], "unknown TrainingArguments field"),
        (
            ["gpt2", "--hardware", "cpu", "--set", "per_device_train_batch_size=3", "--effective-batch-size", "8"],
            "does not divide the 8 samples",
        ),
        (["gpt2", "--export", __file__], "is a file, not a folder"),
    ],
)
def test_bad_input(words, error, command):
    code, out, err = command("plan", *words)
    assert code == 2 and error in err and len(err.strip().splitlines()) <= 2 and not out


def test_python_refuses_the_same():
    with pytest.raises(InputError, match="unknown method"):
        plan("gpt2", "rtx_4090", method="all")
    with pytest.raises(InputError, match="seq_len=0 must be above 0"):
        plan("gpt2", "rtx_4090", seq_len=0)
    _check_memory(dataclasses.replace(small_spec(resolve_preset("cpu", "full")), seq_len=1, memory=1))


def test_models_without_tokens_are_refused():

    with pytest.raises(InputError, match="task=image-classification: plan knows models of text and video"):
        plan(AutoConfig.for_model("vit"), "rtx_4090")


def test_a_launched_recipe_reads_what_was_set():
    """Whatever a field holds: nothing, a text that looks like a number, lists and mappings."""
    from hf_memopt.recipe.recipe_arguments import parse

    preset = resolve_preset("rtx_4090", "lora")
    choice = Choice("none", 1, 64, 0.5, preset.training["optim"], preset.dtype)
    lora = {"layers_to_transform": None, "layers_pattern": ["h", "b"], "rank_pattern": {"q": 4}, "use_rslora": True}
    training = {"run_name": "it's a run", "warmup_steps": 0.5, "label_names": ["labels", "2"], "max_grad_norm": 0}
    training |= {"report_to": ["trackio", "wandb"], "include_for_metrics": ["loss"]}
    training |= dict.fromkeys(("hub_model_id", "save_total_limit", "dataloader_prefetch_factor", "tf32"))
    spec = dataclasses.replace(small_spec(preset), lora=lora, training=training)
    memory_args = memory_arguments(MemoryArguments(), choice)
    profile = Profile("safe", 0.85, choice, choice.configured(preset), memory_args, None, 1.0, 1.0)
    words = shlex.split(launch_command(spec, profile))
    assert words[words.index("--lora.layers_to_transform") + 1] == "null"
    parsed = parse(words[words.index("recipes/pretrain.py") + 1 :])
    assert {name: parsed.lora[name] for name in lora} == lora
    assert {name: parsed.training[name] for name in training} == training


def test_which_jobs_a_recipe_runs():
    from hf_memopt.video.inputs import VideoInputs

    spec = small_spec(resolve_preset("rtx_4090", "lora"))
    encoder = AutoConfig.for_model("bert")
    for fields, recipe in (
        ({"model": spec.config}, None),
        ({"model": spec.config, "task": "sft"}, None),
        ({"model": "a/b"}, "pretrain"),
        ({"model": "a/b", "video": VideoInputs()}, "video_sft"),
        ({"model": "a/b", "config": encoder}, None),
        ({"model": "a/b", "config": encoder, "video": VideoInputs()}, "video_sft"),
        ({"model": "a/b", "task": "token-classification"}, None),
        ({"model": "a/b", "task": "sft"}, "sft"),
        ({"model": "a/b", "task": "grpo"}, "grpo"),
        ({"model": "a/b", "task": "kto"}, None),
    ):
        asked = dataclasses.replace(spec, **fields)
        assert (recipe_name(asked) if has_recipe(asked) else None) == recipe, fields
