"""Which engine an estimate is of: a strategy goes before fields, and nothing else of this process counts."""

import contextlib
import copy
import dataclasses
import json
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, TrainingArguments

from hf_memopt.errors import InputError
from hf_memopt.estimator import estimate
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.presets import get_preset, preset_by_name
from hf_memopt.recipe.summary import _engine_label

SHAPE = {
    **{"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"max_position_embeddings": 256, "vocab_size": 500, "num_hidden_layers": 2},
}
LAUNCHES = [
    {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"},
    {"WORLD_SIZE": "8", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"},
    {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
    {"ACCELERATE_MIXED_PRECISION": "fp8"},
    {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SIZE": "4"},
]


def job(fields=(), strategy=None, world_size=2):
    config = AutoConfig.for_model("llama", **SHAPE)
    return describe(config, {"bf16": True, **dict(fields)}, 64, "a100_80gb", strategy=strategy, world_size=world_size)


_REPLACED_ENGINES = [
    *(({"fsdp": True}, "ddp", "ddp"), ({"fsdp": True}, "none", "ddp"), ({"fsdp": True}, "zero2", "deepspeed")),
    *(({"fsdp": True}, "hsdp2", "mesh"), ({"deepspeed": "zero2"}, "ddp", "ddp")),
    *(({"deepspeed": "zero2"}, "fsdp2", "fsdp2"), ({"deepspeed": "zero3"}, "tp2", "mesh")),
    *(({"fsdp": True}, None, "fsdp2"), ({"deepspeed": "zero2"}, None, "deepspeed")),
    ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp2", "fsdp2"),
]


def test_a_strategy_replaces_the_engine_of_the_fields(subtests):
    for fields, strategy, engine in _REPLACED_ENGINES:
        with subtests.test(fields=str(fields), strategy=str(strategy), engine=str(engine)):
            described = job(fields, strategy)
            assert described.engine.family == engine
            assert described.engine.family != "fsdp1"
            if strategy:
                assert not described.fields.keys() & {"fsdp", "deepspeed"} - (
                    {"deepspeed"} if strategy == "zero2" else set()
                )


def test_ddp_is_estimated_as_ddp_whatever_the_fields_ask_for():
    plain, with_field = (
        estimate(AutoConfig.for_model("llama", **SHAPE), fields, 64, "a100_80gb", world_size=2, strategy="ddp")
        for fields in ({"bf16": True}, {"bf16": True, "fsdp": True})
    )
    assert with_field.to_dict() == plain.to_dict()


def test_arguments_in_an_object_count_less_than_a_strategy_too(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, fsdp=True)
    config = AutoConfig.for_model("llama", **SHAPE)
    assert describe(config, args, 64, "a100_80gb", strategy="ddp", world_size=2).engine.family == "ddp"
    assert describe(config, args, 64, "a100_80gb", world_size=2).engine.family == "fsdp2"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}},
        {"fsdp": True, "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}},
        {
            **{"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
            **{"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-6}},
            "accelerator_config": {"split_batches": False},
        },
    ],
    ids=["deepspeed", "fsdp", "other"],
)
def test_an_estimate_leaves_its_arguments_as_they_are(fields):
    fields = {"per_device_train_batch_size": 1, "bf16": True, **fields}
    before = copy.deepcopy(fields)
    estimate(AutoConfig.for_model("llama", **SHAPE), fields, 64, "a100_80gb", world_size=2)
    assert fields == before


@pytest.mark.slow
def test_an_estimate_leaves_training_arguments_as_they_are(tmp_path):
    args = TrainingArguments(str(tmp_path), use_cpu=True, bf16=True, fsdp=True, fsdp_config={"version": 2})
    before = copy.deepcopy(args.to_dict())
    estimate(AutoConfig.for_model("llama", **SHAPE), args, 64, "a100_80gb", world_size=2)
    assert args.to_dict() == before


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda launch: " ".join(launch))
def test_a_launch_changes_no_preset_of_another_job(launch, monkeypatch, command):
    own = preset_by_name("l40s"), command("show", "rtx_3070", "--json")
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    assert (preset_by_name("l40s"), command("show", "rtx_3070", "--json")) == own
    assert get_preset("l40s") != own[0]


@pytest.mark.drawn(1)
@pytest.mark.parametrize("launch", LAUNCHES[:4], ids=lambda launch: " ".join(launch))
def test_a_launch_changes_no_estimate_of_the_command_line(launch, monkeypatch, command):
    argv = ["estimate", "llama-3.2-1b", "--preset", "l40s", "--set", "model.num_hidden_layers=2", "--json"]
    code, out, err = command(*argv)
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    assert command(*argv)[:2] == (code, out), err


@pytest.mark.slow
def test_processes_of_the_command_line_share_a_mesh(command):
    argv = ["estimate", "llama-3.2-1b", "--preset", "l40s", "--set", "model.num_hidden_layers=4"]
    code, out, err = command(*argv, "--strategy", "tp2_hsdp2", "--world-size", "4", "--json")
    assert code == 0, err
    assert "predicted for one of 4 devices, tp2_hsdp2" in json.loads(out)["notes"]
    code, _, err = command(*argv, "--strategy", "tp2_hsdp2", "--world-size", "6")
    assert code == 2 and "does not divide the 6 processes" in err


def test_a_field_beside_another_strategy_is_refused():
    for name, strategy, fields in (
        *(("l40s_x4", "ddp", {"fsdp": True}), ("l40s_x4", "zero2", {"fsdp": True})),
        *(("l40s_x4", "fsdp2", {"deepspeed": "zero2"}), ("l40s_x4", "tp4", {"deepspeed": "zero2"})),
    ):
        with pytest.raises(InputError, match=f"beside strategy {strategy}: leave one of the two out"):
            spec_job(preset_spec(preset_by_name(name, strategy=strategy), training=fields))
    for strategy, fields, own in (
        ("zero3", {"deepspeed": "zero3_offload_cpu"}, "zero3_offload_cpu"),
        ("zero2", {"deepspeed": {"zero_optimization": {"stage": 1}}}, "zero1"),
        ("fsdp2", {"fsdp": True, "fsdp_config": {"cpu_offload": True}}, "fsdp2_offload_cpu"),
        ("zero3", {"deepspeed": "zero3"}, None),
        ("fsdp2", {"fsdp": True, "fsdp_config": {"activation_checkpointing": True}}, None),
    ):
        asked = preset_spec(preset_by_name("l40s_x4", strategy=strategy), training=fields)
        assert spec_job(asked).engine.strategy == (own or strategy), "a preset's own gives way"
        refused = pytest.raises(InputError, match=f" is {own}, beside strategy {strategy}: leave one of the two out")
        with refused if own else contextlib.nullcontext():
            spec_job(dataclasses.replace(asked, strategy=strategy))
    ddp = preset_spec(preset_by_name("l40s_x4", strategy="ddp"), training={"deepspeed": "zero2"})
    assert spec_job(ddp).engine.family == "deepspeed"
    assert (
        spec_job(preset_spec(preset_by_name("l40s"), training={"fsdp": True}, world_size=2)).engine.family == "fsdp2"
    )
    fsdp = preset_by_name("l40s_x4", strategy="fsdp2")
    sharded = [spec_job(preset_spec(fsdp, world_size=size)).engine.family for size in (1, 2, 4)]
    assert sharded == ["none", "fsdp2", "fsdp2"], "one process shards nothing"


@pytest.mark.slow
@pytest.mark.parametrize("key", ["version", "fsdp_version"])
def test_fsdp1_is_called_fsdp1(key, tmp_path):
    fields = {"fsdp": True, "fsdp_config": {key: 1}}
    for args in (fields, TrainingArguments(str(tmp_path), use_cpu=True, **copy.deepcopy(fields))):
        notes = estimate(AutoConfig.for_model("llama", **SHAPE), args, 64, "a100_80gb", world_size=2).notes
        assert "predicted for one of 2 devices, fsdp1" in notes
        assert any(note.startswith("FSDP1 is counted as FSDP2") for note in notes)


def test_a_run_under_fsdp1_is_called_fsdp1(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert _engine_label(SimpleNamespace(args={}, preset=get_preset("l40s"))) == "fsdp1"


def test_fsdp_settings_may_be_a_file_or_texts(tmp_path):
    file = tmp_path / "fsdp.json"
    file.write_text(json.dumps({"fsdp_version": 1, "fsdp_activation_checkpointing": "false"}))
    described = job({"fsdp": True, "fsdp_config": str(file)})
    assert described.engine.family == "fsdp1"
    assert not described.at_depth(2).fields.get("activation_checkpointing")


@pytest.mark.parametrize(
    ("asked", "by_trainer", "by_fsdp"),
    [
        ({}, False, True),
        ({"activation_checkpointing": True}, True, False),
        ({"activation_checkpointing": False}, False, False),
    ],
)
def test_under_fsdp2_one_of_the_two_checkpoints(asked, by_trainer, by_fsdp):
    """FSDP as its preset does, unless the user names the Trainer's; both together the Trainer refuses."""
    preset = resolve_preset("h100_80gb_x8", "full", "fsdp2", None)
    spec = preset_spec(preset, "qwen3-0.6b", MemoryArguments(), training=asked)
    job = spec_job(spec)
    assert (bool(job.fields.get("activation_checkpointing")), job.engine.checkpointing) == (by_trainer, by_fsdp)
    both = {"activation_checkpointing": True, "fsdp_config": {"activation_checkpointing": True}}
    with pytest.raises(InputError, match="use one of them: leave activation_checkpointing"):
        spec_job(preset_spec(preset, "qwen3-0.6b", MemoryArguments(), training=both))
