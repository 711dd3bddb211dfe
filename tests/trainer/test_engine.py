"""The compatibility table is asked with what really runs: arguments, the launcher's environment, plugins."""

import json
import os
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, run, slow, sweep
from torch.distributed.fsdp import ShardingStrategy

from hf_memopt import MemoryArguments, MemoryTrainer
from hf_memopt.compatibility import RULES, Setup, refusals, resolve_engine
from hf_memopt.engines.deepspeed import deepspeed_config
from hf_memopt.engines.fsdp import FSDP
from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate
from hf_memopt.estimator.training_fields import read_fields
from hf_memopt.presets import get_preset

OFFLOADING = str(ROOT / "accelerate_configs" / "deepspeed" / "zero2_offload_cpu.json")
ZERO3 = str(ROOT / "accelerate_configs" / "deepspeed" / "zero3.json")
ENGINES = ("zero0", "zero1", "zero2", "zero3", "fsdp1", "fsdp2", "tp", "ddp")
WAYS = ("argument", "environment", "plugin")


def zero(engine: str, offload: str, optimizer: bool) -> dict:
    """A DeepSpeed configuration."""
    zero = {"stage": int(engine[4])} | ({"offload_optimizer": {"device": offload}} if offload != "none" else {})
    return {"zero_optimization": zero} | ({"optimizer": {"type": "AdamW"}} if optimizer else {})


def arguments_for(engine: str, offload: str, optimizer: bool, checkpointing: bool) -> dict:
    """The TrainingArguments fields that ask for an engine."""
    if engine.startswith("zero"):
        return {"deepspeed": zero(engine, offload, optimizer)}
    if engine.startswith("fsdp"):
        config = {"version": int(engine[4]), "activation_checkpointing": checkpointing}
        return {"fsdp": True, "fsdp_config": config}
    from accelerate import ParallelismConfig

    return {"parallelism_config": ParallelismConfig(tp_size=2)}


def environment_for(engine: str, offload: str, optimizer: bool, checkpointing: bool, folder) -> dict[str, str]:
    """What `accelerate launch` sets for an engine."""
    if engine.startswith("zero"):
        (folder / "deepspeed.json").write_text(json.dumps(zero(engine, offload, optimizer)))
        return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "deepspeed.json")}
    if engine.startswith("fsdp"):
        return {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": engine[4],
            "FSDP_ACTIVATION_CHECKPOINTING": str(checkpointing).lower(),
        }
    if engine == "tp":
        return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
    return {"WORLD_SIZE": "2"}


def state_for(engine: str, offload: str, optimizer: bool, checkpointing: bool) -> SimpleNamespace:
    """accelerate's state with the plugin of an engine."""
    from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    if engine.startswith("zero"):
        return SimpleNamespace(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=zero(engine, offload, optimizer)))
    plugin = FullyShardedDataParallelPlugin(fsdp_version=int(engine[4]), activation_checkpointing=checkpointing)
    return SimpleNamespace(fsdp_plugin=plugin)


def cases():
    """Every engine and offload of every row, in every way in which that engine can be asked for."""
    for number, rule in enumerate(RULES):
        engines = sorted(rule.when.get("strategy", frozenset()) & set(ENGINES))
        for engine, offload, way in product(engines, sorted(rule.when.get("offload", {"none"})), WAYS):
            if (engine, way) not in {("ddp", "argument"), ("ddp", "plugin"), ("tp", "plugin")}:
                yield number, engine, offload, way


def test_every_row_is_tripped_in_every_way(tmp_path, subtests):
    for number, engine, offload, way in cases():
        with subtests.test(f"{number} {engine} {offload} {way}"), pytest.MonkeyPatch.context() as patched:
            rule = RULES[number]
            rest = {
                name: sorted(values)[0] for name, values in rule.when.items() if name not in ("strategy", "offload")
            }
            decided = {name: rest.pop(name, False) for name in ("engine_optimizer", "engine_checkpointing")}.values()
            fields, state = {}, None
            if way == "argument":
                fields = arguments_for(engine, offload, *decided)
            elif way == "environment":
                for name, value in environment_for(engine, offload, *decided, tmp_path).items():
                    patched.setenv(name, value)
            else:
                state = state_for(engine, offload, *decided)
            setup = Setup(**resolve_engine(fields, state).setup(), **rest)
            assert rule.matches(setup)
            assert refusals(setup)


@pytest.mark.parametrize(
    "given", [OFFLOADING, "zero2_offload_cpu", deepspeed_config(OFFLOADING)], ids=["file", "name", "contents"]
)
def test_a_copied_deepspeed_json_is_refused_with_a_presets_8bit_optimizer(given, tmp_path):
    preset = get_preset("rtx_4090")
    assert preset.training["optim"] == "adamw_8bit"
    with pytest.raises(InputError, match="optim=adamw_8bit with zero2 with optimizer states offloaded to cpu"):
        preset.training_arguments(str(tmp_path), deepspeed=given, use_cpu=True)


def test_a_shipped_name_becomes_the_file(tmp_path):
    args = get_preset("cpu").training_arguments(str(tmp_path), deepspeed="zero2")
    assert args.deepspeed_plugin.zero_stage == 2


def test_an_estimate_refuses_what_training_refuses():
    fields = {"optim": "adamw_8bit", "deepspeed": "zero2_offload_cpu", "bf16": True}
    with pytest.raises(InputError, match="optim=adamw_8bit with zero2"):
        estimate("llama-3.1-8b", fields, 512, "rtx_4090", world_size=2)


@pytest.mark.parametrize(
    ("fields", "environment", "says"),
    [
        (
            {"deepspeed": "zero3"},
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"},
            "zero3.json asks for zero3 and accelerate launch for zero2: leave one of the two out",
        ),
        (
            {"deepspeed": "zero2"},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
            "zero2.json asks for zero2 and accelerate launch for fsdp2: leave one of the two out",
        ),
        (
            {"fsdp": True},
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"},
            "fsdp=True asks for fsdp2 and accelerate launch for fsdp1: leave one of the two out",
        ),
        ({"fsdp": True, "deepspeed": "zero2"}, {}, "zero2.json asks for zero2 and fsdp=True for fsdp2"),
    ],
)
def test_two_engines_that_differ_are_refused(fields, environment, says, monkeypatch, tmp_path):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=says):
        get_preset("rtx_4090").training_arguments(str(tmp_path), use_cpu=True, **fields)


def test_what_accelerate_sets_for_a_plugin_is_no_launcher(monkeypatch):
    """A second Trainer of a process may have another engine than the first."""
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert resolve_engine({"deepspeed": "zero3"}).strategy == "zero3"
    assert resolve_engine({}).strategy == "zero2"  # DeepSpeedPlugin's default, which Trainer would take


def test_the_sizes_of_two_parallelisms(monkeypatch):
    from accelerate import ParallelismConfig

    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert resolve_engine({"parallelism_config": ParallelismConfig()}).name == "tp"
    with pytest.raises(InputError, match="parallelism_config has tp_size=2 and accelerate launch tp_size=4"):
        resolve_engine({"parallelism_config": ParallelismConfig(tp_size=2)})
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(InputError, match="parallelism_config has tp_size=4 and accelerate launch tp_size=2"):
        resolve_engine({"parallelism_config": ParallelismConfig(tp_size=4)})
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "1")
    assert resolve_engine({"parallelism_config": ParallelismConfig(tp_size=4)}).name == "tp"


def test_an_engine_of_a_plugin_is_estimated(tmp_path, monkeypatch):
    from transformers import TrainingArguments

    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    args = TrainingArguments(tmp_path, use_cpu=True)
    assert read_fields(args)["deepspeed"]["zero_optimization"]["stage"] == 3


def tiny():
    """A language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=64
    )
    return LlamaForCausalLM(config)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"deepspeed": OFFLOADING, "optim": "adamw_8bit"}, "optim=adamw_8bit with zero2"),
        ({"deepspeed": ZERO3, "auto_find_batch_size": True}, "auto_find_batch_size=True with zero3"),
        ({"fsdp": True}, "on cpu with fsdp2: accelerate does not support FSDP"),
        ({"optim": "galore_adamw_layerwise", "gradient_accumulation_steps": 2}, "cannot accumulate"),
    ],
)
def test_a_memory_trainer_refuses_before_training(fields, says, tmp_path):
    from transformers import TrainingArguments

    extra = {"optim_target_modules": "all-linear"} if "galore" in fields.get("optim", "") else {}
    args = TrainingArguments(tmp_path, use_cpu=True, **fields, **extra)
    with pytest.raises(InputError, match=says):
        MemoryTrainer(model=tiny(), args=args)


def test_a_plugin_that_replaces_the_arguments_one_is_asked(tmp_path):
    from accelerate import DeepSpeedPlugin
    from transformers import TrainingArguments

    args = TrainingArguments(tmp_path, use_cpu=True, optim="adamw_8bit")
    args.deepspeed_plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu")
    with pytest.raises(InputError, match="optim=adamw_8bit with zero2 with optimizer states offloaded"):
        MemoryTrainer(model=tiny(), args=args)


def test_an_optimizer_object_counts_and_the_field_that_it_replaces_does_not(tmp_path):
    import bitsandbytes
    from transformers import TrainingArguments

    model = tiny()
    args = TrainingArguments(tmp_path, use_cpu=True, optim="adamw_8bit", deepspeed=OFFLOADING)
    eight_bit = bitsandbytes.optim.AdamW8bit(model.parameters())
    with pytest.raises(InputError, match="optim=adamw_8bit"):
        MemoryTrainer(model=model, args=args, optimizers=(eight_bit, None))
    from hf_memopt.trainer.combination import check_combination

    check_combination(model, args, optimizer=torch.optim.AdamW(model.parameters()))


SCRIPT = """
import sys
from hf_memopt import MemoryTrainer
from hf_memopt.program import run
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

def main():
    fields = {"deepspeed": sys.argv[1]} if len(sys.argv) > 1 else {}
    args = TrainingArguments("out", use_cpu=True, optim="adamw_8bit", **fields)
    config = LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
                         vocab_size=64)
    MemoryTrainer(model=LlamaForCausalLM(config), args=args)

run(main)
"""
LAUNCH = ["accelerate", "launch", "--num_processes", 1, "--main_process_port", 0, "--config_file"]
CONFIGURATIONS = {
    "zero2_offload": "distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config:\n  zero_stage: 2\n"
    "  offload_optimizer_device: cpu\n",
    "zero3": f"distributed_type: DEEPSPEED\nuse_cpu: true\ndeepspeed_config:\n  deepspeed_config_file: {ZERO3}\n",
    "fsdp2": "distributed_type: FSDP\nuse_cpu: true\nfsdp_config:\n  fsdp_version: 2\n",
}


@pytest.mark.parametrize(
    ("launcher", "arguments", "says"),
    [
        slow(["python"], [OFFLOADING], "optim=adamw_8bit with zero2 with optimizer states offloaded to cpu"),
        sweep(["torchrun", "--standalone", "--nproc_per_node", 1], [OFFLOADING], "optim=adamw_8bit with zero2"),
        sweep(
            [*LAUNCH, "zero2_offload.yaml"], [], "optim=adamw_8bit with zero2 with optimizer states offloaded to cpu"
        ),
        slow([*LAUNCH, "zero3.yaml"], [OFFLOADING], "asks for zero2_offload_cpu and accelerate launch for zero3"),
        slow([*LAUNCH, "fsdp2.yaml"], [], "fsdp2"),
    ],
    ids=["python", "torchrun", "launch", "both", "fsdp2-yaml"],
)
def test_a_plain_script_is_refused_in_one_sentence(launcher, arguments, says, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, text in CONFIGURATIONS.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    done = run(*launcher, "train.py", *arguments, cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}{os.pathsep}."})
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode != 0
    assert len(errors) >= 1 and says in errors[0], done.stderr[-3000:]
    assert "Traceback" not in done.stderr.split("error: ")[0], done.stderr[-3000:]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--optim", "adamw_8bit", "--deepspeed", OFFLOADING], "optim=adamw_8bit with zero2"),
        (["--tp_size", "2", "--deepspeed", ZERO3], "zero3 is asked for by deepspeed="),
        (["--fsdp", "true"], "accelerate does not support FSDP on CPU"),
    ],
)
def test_a_recipe_is_refused_before_anything_is_written(recipe, argv, says, tmp_path):
    with pytest.raises(InputError, match=says):
        recipe("sft")(["--preset", "cpu", "--output_dir", str(tmp_path / "out"), *argv])
    assert not (tmp_path / "out").exists()


def test_levers_are_asked_with_the_same_engine(tmp_path):
    from transformers import TrainingArguments

    args = TrainingArguments(tmp_path, use_cpu=True, deepspeed=ZERO3)
    with pytest.raises(InputError, match="activation_offload would store the weights that ZeRO-3 gathers"):
        MemoryTrainer(model=tiny(), args=args, memory_args=MemoryArguments(activation_offload=True))


def test_an_fsdp_version_that_there_is_not():
    with pytest.raises(InputError, match=r"fsdp_config.version='two' must be 1 or 2"):
        resolve_engine({"fsdp": True, "fsdp_config": {"version": "two"}})


def test_weights_that_stay_gathered_after_forward():
    """reshard_after_forward is a truth under FSDP2 and a sharding strategy under FSDP1, as text or enumeration."""
    for value, reshards in (
        *((value, False) for value in (False, "false", "NO", "n", "off", "f", "0", "SHARD_GRAD_OP")),
        *((value, True) for value in (None, True, "true", "yes", "1", "FULL_SHARD", "HYBRID_SHARD")),
        (ShardingStrategy.SHARD_GRAD_OP, False),
        (ShardingStrategy.FULL_SHARD, True),
    ):
        assert FSDP.of_settings({"reshard_after_forward": value}).reshards is reshards, value
