"""What would fail after loading is told before: every check is tripped."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT, flags, run
from peft import BOFTConfig, LoraConfig
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, LlamaConfig

from hf_memopt.errors import InputError
from hf_memopt.estimator.tracing.model import count_weights, weight_sizes
from hf_memopt.recipe.preflight import Launch, check, check_sharded, describe_launch, problems

BILLION = 10**9
GIB = 2**30
MICRO = "train_micro_batch_size_per_gpu"


def zero(stage: int = 3, **parts) -> dict:
    return {"zero_optimization": {"stage": stage, **{name: value for name, value in parts.items()}}}


CPU = {"device": "cpu", "pin_memory": True}


def test_every_check_trips(subtests):
    for made, words in [
        (Launch(world_size=8, parallel={"dp_shard": 2, "tp": 2}), ["dp_shard 2 × tp 2 = 4", "num_processes=4"]),
        (Launch(deepspeed={MICRO: 4}, batches={MICRO: 2}), [f"{MICRO}=4, TrainingArguments 2", '"auto"']),
        (Launch(deepspeed={"train_batch_size": 64}, batches={"train_batch_size": 32}), ["train_batch_size=64"]),
        (
            Launch(world_size=8, per_host=8, weights=7 * BILLION, fsdp_efficient=False, host_free=64 * GIB),
            ["fsdp_cpu_ram_efficient_loading is off", "104.31 GiB", "set it to true"],
        ),
        (
            Launch(deepspeed=zero(offload_optimizer=CPU), compiles={"cpu_adam": False}),
            ["offload_optimizer.device=cpu", "cpu_adam", "install a C++ compiler"],
        ),
        (
            Launch(deepspeed=zero(offload_param={"device": "nvme", "nvme_path": "."}), compiles={"async_io": False}),
            ["offload_param.device=nvme", "async_io", "libaio-dev"],
        ),
        (
            Launch(
                world_size=8,
                per_host=8,
                weights=7 * BILLION,
                trained=7 * BILLION,
                host_free=64 * GIB,
                deepspeed=zero(offload_optimizer=CPU),
            ),
            ["needs 104.31 GiB", "64.00 GiB are free"],
        ),
        (
            Launch(
                world_size=8, largest=128256 * 8192, deepspeed=zero(offload_param={"device": "nvme", "nvme_path": "."})
            ),
            ["buffer_size=100000000 is smaller", "131334144 elements"],
        ),
        (
            Launch(
                world_size=2,
                trained=4 * 10**6,
                deepspeed=zero(
                    sub_group_size=10**6,
                    offload_optimizer={
                        **{"device": "nvme", "nvme_path": ".", "pipeline_read": True, "pipeline_write": True},
                    },
                ),
            ),
            ["buffer_count=4 is too few", "set it to 12"],
        ),
        (
            Launch(deepspeed=zero(offload_param={"device": "nvme", "nvme_path": "."}), lockable=8 * 2**20),
            ["0.93 GiB of locked memory a process", "0.01 GiB may be locked", "ulimit -l unlimited"],
        ),
        (
            Launch(
                world_size=8,
                per_host=8,
                weights=BILLION,
                trained=BILLION,
                host_free=16 * GIB,
                deepspeed=zero(offload_optimizer={"device": "nvme", "nvme_path": "."}),
            ),
            ["needs 26.08 GiB", "sub_group_size"],
        ),
        (
            Launch(deepspeed=zero(offload_optimizer={"device": "nvme", "nvme_path": "/no/such"})),
            ["nvme_path=/no/such is not a folder", "--nvme-path"],
        ),
        (Launch(locks=[Path("cpu_adam/lock")]), ["cpu_adam/lock is left", "delete it"]),
        (Launch(deepspeed=zero(offload_optimizer={"device": "nvme"})), ["nvme_path=None is not a folder"]),
        (
            Launch(trained=10**15, deepspeed=zero(offload_optimizer={"device": "nvme", "nvme_path": "."})),
            ["nvme_path=. needs", "are free"],
        ),
    ]:
        with subtests.test(made=made, words=words):
            (reason,) = problems(made)
            assert all(word in reason for word in words) and "\n" not in reason
            with pytest.raises(InputError, match="preflight: "):
                check(made)


def test_every_reason_is_given_at_once():
    made = Launch(
        deepspeed=zero(offload_param={"device": "nvme", "nvme_path": "/no/such"}), compiles={"async_io": False}
    )
    with pytest.raises(InputError) as error:
        check(made)
    assert len(list(problems(made))) == 2 and all(reason in str(error.value) for reason in problems(made))


def test_a_folder_that_cannot_be_written_to(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    made = Launch(deepspeed=zero(offload_param={"device": "nvme", "nvme_path": str(tmp_path)}))
    assert "cannot be written to" in next(problems(made))


def test_half_the_machines_hold_half_of_what_is_offloaded():
    fields = {"weights": BILLION, "trained": BILLION, "deepspeed": zero(offload_optimizer=CPU, offload_param=CPU)}
    needed = 18 * BILLION
    assert not list(problems(Launch(world_size=16, per_host=8, host_free=int(needed / 2 / 0.9) + 1, **fields)))
    assert list(problems(Launch(world_size=16, per_host=8, host_free=int(needed / 2 / 0.9) - 10, **fields)))


def test_what_works_has_no_problems():
    assert not list(problems(Launch()))
    assert not list(problems(Launch(world_size=8, parallel={"dp_replicate": 2, "dp_shard": 4}, deepspeed=None)))
    assert not list(problems(Launch(per_host=8, weights=BILLION, fsdp_efficient=True, host_free=GIB)))
    auto = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2}
    assert not list(
        problems(Launch(deepspeed=auto, batches={"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}))
    )


def test_weights_are_counted_of_models_and_adapters_that_need_values():
    """SigLIP asks for the largest of its initial weights, BOFT's blocks are made from numbers."""
    part = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**part, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300}
    siglip = Gemma3Config(text_config=text, vision_config={**part, "image_size": 28, "patch_size": 14})
    with torch.device("meta"):
        weights = Gemma3ForConditionalGeneration(siglip).parameters()
    assert count_weights(siglip, "image-text-to-text") == sum(weight.numel() for weight in weights)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    lora = LoraConfig(r=8, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert weight_sizes(config, "causal-lm", peft_config=lora) == [8 * 64] * 4
    boft = BOFTConfig(boft_block_size=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    assert count_weights(config, "causal-lm", peft_config=boft) == 2 * (16 * 4 * 4 + 64)


def test_this_launch_is_read(monkeypatch, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    config = LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, vocab_size=500
    )
    assert count_weights(config, "causal-lm") == sum(
        weight.numel() for weight in LlamaForCausalLM(config).parameters()
    )
    for name, value in {
        **{"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
        **{"PARALLELISM_CONFIG_DP_SHARD_SIZE": "4", "ACCELERATE_USE_FSDP": "true"},
        **{"FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "LOCAL_WORLD_SIZE": "8"},
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("ACCELERATE_USE_FSDP")
    args = TrainingArguments(tmp_path, use_cpu=True, per_device_train_batch_size=4, gradient_accumulation_steps=2)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    found = describe_launch(args, config, "causal-lm", "bfloat16")
    assert found.parallel == {"dp_shard": 4, "tp": 2} and found.per_host == 8 and found.fsdp_efficient is False
    assert found.weight_bytes == 2 and found.trained == found.weights and found.batches["train_batch_size"] == 8
    assert describe_launch(args, config, "causal-lm", "bfloat16", adapters=True).trained == 0


def test_weights_that_zero3_did_not_shard():
    model = torch.nn.Linear(2, 2)
    check_sharded(model, 2)
    with pytest.raises(InputError, match=r"2 weights \(weight, …\) were loaded whole"):
        check_sharded(model, 3)
    for weight in model.parameters():
        weight.ds_numel = 4
    check_sharded(model, 3)


@pytest.mark.slow
def test_a_real_launch_is_stopped_before_anything_is_loaded(tmp_path, jsonl, builtin_model):
    """accelerate launch, two processes, ZeRO-3 on a disk that is not there, without a compiler: one line says both.

    On every machine: what this one has of compilers, libaio or locked memory does not change what is said.
    """
    done = run("hf-memopt", "export", "cpu_x2", tmp_path / "run", "--strategy", "zero3_offload_nvme")
    assert done.returncode == 0, done.stderr
    settings = tmp_path / "run" / "deepspeed.json"
    config = json.loads(settings.read_text())
    for part in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][part]["nvme_path"] = "/no/such/disk"
    settings.write_text(json.dumps(config))
    done = run(
        "accelerate",
        "launch",
        *flags(config_file=tmp_path / "run" / "accelerate.yaml", main_process_port=0),
        ROOT / "recipes" / "pretrain.py",
        *flags(
            preset="cpu_x2",
            dataset_name=jsonl([{"text": "a few words to train on"}] * 20),
            model_name_or_path=builtin_model,
            max_length=16,
            output_dir=tmp_path / "out",
            held_out=0,
            max_steps=1,
        ),
        env={"CXX": "no-such-compiler"},
    )
    (line,) = {line for line in done.stderr.splitlines() if line.startswith("error: preflight: ")}
    assert "nvme_path=/no/such/disk is not a folder" in line
    assert "offload_param.device=nvme needs DeepSpeed's async_io, which cannot be built here" in line
    assert done.returncode != 0 and not (tmp_path / "out" / "memory_report.json").exists()
