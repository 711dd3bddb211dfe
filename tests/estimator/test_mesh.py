"""Models that transformers cuts up (strategies tpN, hsdpN): names, presets, exports, estimates, a launch and its
resume."""

import json
from dataclasses import replace

import pytest
import yaml
from conftest import ROOT, first_process, flags, run, run_forked
from transformers import AutoConfig

from hf_memopt import MemoryArguments, get_preset
from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate
from hf_memopt.estimator.overheads import largest_group
from hf_memopt.trainer.checkpoints.intact import newest_intact


def test_a_preset_cut_up():
    """Eight devices that share every batch accumulate eight times as often; masters are what is loaded."""
    preset = get_preset("h100_80gb_x8", strategy="tp8")
    assert (preset.effective_batch_size, preset.gradient_accumulation_steps, preset.dtype) == (64, 64, "float32")
    assert get_preset("h100_80gb_x8", strategy="hsdp8").gradient_accumulation_steps == 8
    assert preset.accelerate_config()["distributed_type"] == "MULTI_GPU"
    for name, method, strategy, reason in (
        ("h100_80gb_x8", "lora", "tp8", "peft sizes the adapters by each rank's shard"),
        ("h100_80gb_x16_nodes", "lora", "hsdp8", "with replicas"),
        ("h100_80gb_x8", "qlora", "hsdp8", "quantization state"),
        ("cpu_x2", "full", "tp2", "on accelerators only"),
    ):
        with pytest.raises(InputError, match=reason):
            get_preset(name, method, strategy)


@pytest.mark.slow
def test_gradients_stay_sharded_between_micro_batches():
    """transformers' own Trainer keeps all of them in fp32, four bytes a weight, where there are no replicas."""
    config = AutoConfig.for_model(
        "llama", hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=4, vocab_size=4000
    )
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}

    def peak(strategy, **more):
        return estimate(config, fields, 32, "a100_80gb", world_size=8, strategy=strategy, **more).peak_allocated_bytes

    weights = estimate(config, fields, 32, "a100_80gb").breakdown["parameters"]
    plain, ours = peak("hsdp8"), peak("hsdp8", memory_args=MemoryArguments())
    assert plain - ours == pytest.approx(weights * 7 / 8, rel=0.15)
    with pytest.raises(InputError, match="loss_chunk_size calls the head a second time"):
        peak("hsdp8", memory_args=MemoryArguments(loss_chunk_size=16))
    assert ours == pytest.approx(peak("fsdp2", memory_args=MemoryArguments()), rel=0.1)


def test_devices_that_share_the_tokens_of_a_batch(command, tmp_path):
    """Ulysses: accelerate's section, the effective batch of the devices' groups, batches that can be shared."""
    import torch
    from accelerate.commands.config.config_args import load_config_from_file

    from hf_memopt.compatibility import check_config_file
    from hf_memopt.data.sample_batches import with_positions

    words = ["export", "h100_80gb_x8", tmp_path / "run", "--strategy", "zero3", "--sequence-parallel", "4"]
    code, _, err = command(*words)
    assert code == 0, err
    check_config_file(tmp_path / "run" / "accelerate.yaml")
    section = load_config_from_file(str(tmp_path / "run" / "accelerate.yaml")).parallelism_config
    assert (section["parallelism_config_sp_size"], section["parallelism_config_dp_shard_size"]) == (4, 2)
    assert replace(get_preset("h100_80gb_x8"), sequence_parallel=4).gradient_accumulation_steps == 32
    for strategy, size, reason in (
        ("fsdp2", "4", "use strategy zero1, zero2 or zero3"),
        ("zero3", "3", "divide the 8"),
    ):
        code, _, err = command(
            "export", "h100_80gb_x8", tmp_path / "no", "--strategy", strategy, "--sequence-parallel", size
        )
        assert code == 2 and reason in err and not (tmp_path / "no").exists()

    batch = with_positions(
        lambda rows: {"input_ids": torch.ones(2, 5, dtype=torch.long), "labels": torch.ones(2, 5, dtype=torch.long)}, 4
    )([])
    assert {name: tensor.shape for name, tensor in batch.items()} == dict.fromkeys(
        ("input_ids", "labels", "position_ids"), torch.Size([2, 8])
    )
    assert batch["labels"][0].tolist() == [1] * 5 + [-100] * 3
    assert batch["position_ids"][1].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]


@pytest.mark.slow
def test_models_load_as_before_after_an_estimate():
    """In a process of its own: what torch looks up once and for all must not be what the estimate put in its place."""
    import subprocess
    import sys

    code = """
from transformers import AutoConfig, AutoModelForCausalLM
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.estimator import estimate
estimate(AutoConfig.from_pretrained(builtin_model()), {}, 32, "a100_80gb", world_size=8, strategy="hsdp8")
model = AutoModelForCausalLM.from_pretrained(builtin_model())
rotary = model.model.rotary_emb
print(bool((rotary.inv_freq == rotary.compute_default_rope_parameters(model.config)[0]).all()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "True", done.stderr


def test_groups_of_weights_are_closed_by_the_one_that_fills_them():
    assert largest_group([3, 3, 3, 3], 6) == 6
    assert largest_group([5, 5, 5], 6) == 10
    assert largest_group([9], 6) == 9 and largest_group([1, 1], 100) == 2


ARGUMENTS = [
    *flags(
        max_steps=4,
        samples=0,
        save_strategy="steps",
        save_steps=2,
        max_length=32,
        logging_steps=1,
        held_out=0,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
    )
]


def _losses(checkpoint):
    history = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [entry["loss"] for entry in history if "loss" in entry]


@pytest.mark.engines
def test_an_exported_run_goes_on_from_its_checkpoint(jsonl, tmp_path):
    """Two real processes that share the weights; transformers alone refuses to resume such a model."""
    import shutil

    done = run_forked("hf-memopt", "export", "cpu_x2", tmp_path / "run", "--strategy", "hsdp2", "--recipe", "sft")
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((tmp_path / "run" / "accelerate.yaml").read_text())["distributed_type"] == "MULTI_GPU"
    data = jsonl([{"prompt": f"What is {n} plus {n}?", "completion": f" It is {2 * n}."} for n in range(60)])
    words = ["sh", tmp_path / "run" / "launch.sh", "--dataset_name", data, *ARGUMENTS]
    out = tmp_path / "run" / "out"
    done = run(*words, env={"MAIN_PROCESS_PORT": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hsdp2, 2 processes" in done.stdout and "memory  not predicted: TRL's trainers" in done.stdout
    whole = _losses(out / "checkpoint-4")
    assert len(whole) == 4 and whole[-1] < whole[0]
    shutil.rmtree(out / "checkpoint-4")
    words += ["--resume_from_checkpoint", "true"]  # what was saved at the end makes it a finished run
    done = run(*words, env={"MAIN_PROCESS_PORT": "0"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert _losses(out / "checkpoint-4") == whole
    shutil.rmtree(out / "checkpoint-2" / "optimizer")
    shutil.rmtree(out / "checkpoint-4")
    with pytest.raises(InputError, match=r"no checkpoint that is intact \(checkpoint-2: no optimizer/"):
        newest_intact(out)


@pytest.mark.slow
def test_engines_that_shard_exclude_each_other(tmp_path):
    done = run_forked(
        "python",
        ROOT / "recipes" / "sft.py",
        *flags(preset="cpu_x2", fsdp_size=2, output_dir=tmp_path / "out"),
        env=first_process(ROOT / "accelerate_configs" / "cpu_x2_zero2.yaml"),
    )
    assert done.returncode == 2 and "transformers shard the model, and zero2 was launched" in done.stderr


@pytest.mark.engines
def test_what_is_cut_up_is_loaded_from_files(tmp_path):
    done = run(
        "accelerate",
        "launch",
        *flags(config_file=ROOT / "accelerate_configs" / "cpu_x2.yaml", main_process_port=0),
        ROOT / "recipes" / "pretrain.py",
        *flags(preset="cpu_x2", fsdp_size=2, max_steps=1, output_dir=tmp_path / "out"),
    )
    assert done.returncode != 0
    assert "tp_size and fsdp_size shard weights while they are loaded: pass model_name_or_path" in done.stderr
