"""Samples that several devices share (Ulysses): what estimates and plans say of them. test_engines.py runs them."""

import json
from dataclasses import replace

import pytest
from accelerate import ParallelismConfig
from transformers import AutoConfig

from hf_memopt import InputError, MemoryArguments
from hf_memopt.estimator import estimate
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.shared_samples import shared_samples
from hf_memopt.presets import preset_by_name

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 28, "num_key_value_heads": 4}
CONFIG = AutoConfig.for_model(**MODEL, hidden_size=3584, vocab_size=500, max_position_embeddings=131072)


def _spec(hardware="h100_80gbx8", **changes) -> JobSpec:
    preset = resolve_preset(hardware, "full")
    spec = JobSpec(model="Qwen/Qwen2.5-7B", config=CONFIG, preset=preset, method="full", seq_len=131072)
    return replace(spec, effective_batch_size=32, **changes)


def test_a_plan_without_room_for_a_sample_names_the_command_that_shares_it():
    """28 heads are shared by four of eight devices; the command is what export and the recipe read."""
    found = shared_samples(_spec(), None)
    assert found.fits and "of each of 4 devices that share samples (zero3, Ulysses) at " in found.text
    assert "--sequence-parallel 4" in found.text and "hf-memopt export h100_80gb_x8" in found.text
    in_host = Choice("zero2", 1, 4, 1.0, "adamw_torch", "bfloat16", inputs_offloaded=True)
    assert shared_samples(_spec(), in_host) == found
    assert "are not predicted" in shared_samples(_spec(quick=True), None).text
    assert shared_samples(_spec(), replace(in_host, inputs_offloaded=False)) is None
    assert shared_samples(_spec(seq_len=2048), None) is None
    assert shared_samples(_spec("rtx_4090x2"), None) is None, "a box that export does not know"


def test_the_command_writes_a_job(tmp_path, monkeypatch):
    import shlex

    from hf_memopt.cli import main
    from hf_memopt.recipe.arguments import parse

    words = shlex.split(shared_samples(_spec(quick=True), None).text.rpartition(": ")[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="0"):
        main()
    started = (tmp_path / "my-run" / "launch.sh").read_text().replace("\\\n", " ").rsplit("pretrain.py ", 1)[1]
    parsed = parse(shlex.split(started.partition(" --output_dir")[0]))
    assert (parsed.recipe.max_length, parsed.recipe.effective_batch_size) == (131072, 32)
    assert parsed.training["per_device_train_batch_size"] == 1
    assert "parallelism_config_sp_size: 4" in (tmp_path / "my-run" / "accelerate.yaml").read_text()


def shared(count: int = 4, config=CONFIG, strategy="zero3", fields=None, **settings):
    """The estimate of a job whose samples devices share."""
    given = {"parallelism_config": ParallelismConfig(sp_size=count, sp_backend="deepspeed"), **(fields or {})}
    settings = {"dtype": "bfloat16", "world_size": 8, **settings}
    return estimate(
        config, {"per_device_train_batch_size": 1, **given}, 8192, "a100_80gb", strategy=strategy, **settings
    )


def test_each_device_has_its_part_of_the_activations():
    """Half of them under four devices when shared by eight; the engine's part stays, and all tokens are trained on."""
    config = AutoConfig.for_model(**{**MODEL, "num_attention_heads": 32}, hidden_size=512, vocab_size=500)
    found = [shared(count, config, fields={"bf16": True}) for count in (8, 4)]
    eighth, quarter = (each.breakdown["activations"] + each.breakdown["logits"] for each in found)
    assert 1.8 < quarter / eighth < 2.2
    assert found[0].breakdown["optimizer_states"] == found[1].breakdown["optimizer_states"]
    assert "samples shared by 8, 1 × 1 × 1" in found[0].estimated
    assert found[0].speed_kind == "samples that devices share" and found[0].speed_error is None
    assert found[0].tokens_per_second == 8192 / found[0].step_seconds


def test_evaluation_has_whole_samples():
    evaluated = {"bf16": True, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1}
    found, whole = shared(fields=evaluated), shared(1, fields=evaluated)
    assert found.phases["eval"] == pytest.approx(whole.phases["eval"], rel=0.02)
    assert found.phases["backward"] < 0.8 * whole.phases["backward"]


def _layers(*kinds):
    return AutoConfig.for_model(**{**MODEL, "model_type": "qwen3", "hidden_size": 3584, "layer_types": [*kinds]})


REFUSED = [
    ({"strategy": "fsdp2"}, "is DeepSpeed's, and the strategy is fsdp2: use zero1, zero2 or zero3"),
    ({"count": 3, "world_size": 9}, "does not divide the model's 28 attention heads"),
    ({"world_size": 6}, "does not divide the 6 processes"),
    ({"padded": True}, "without padding"),
    ({"memory_args": MemoryArguments(loss_chunk_size=64)}, "loss_chunk_size needs whole samples"),
    ({"fields": {"parallelism_config": ParallelismConfig(cp_size=2)}}, "context parallelism is not predicted"),
    ({"config": _layers("sliding_attention", "full_attention")}, "set attn_implementation=flash_attention_2"),
    ({"config": _layers("linear_attention", "full_attention")}, "linear attention passes a state"),
]


@pytest.mark.parametrize(("settings", "reason"), REFUSED)
def test_what_cannot_be_shared_is_refused(settings, reason):
    with pytest.raises(InputError, match=reason):
        shared(**settings)


def test_a_preset_that_shares_samples_keeps_doing_so():
    preset = replace(preset_by_name("h100_80gb_x8", "full", "zero3"), sequence_parallel=4)
    job = spec_job(preset_spec(preset, CONFIG))
    assert (job.shared, job.fields["gradient_accumulation_steps"]) == (4, preset.gradient_accumulation_steps)


def test_the_command_line_shares_samples(command, tmp_path):
    CONFIG.save_pretrained(tmp_path)
    words = [
        "estimate",
        str(tmp_path),
        "--hardware",
        "a100_80gbx4",
        "--seq-len",
        "8192",
        "--strategy",
        "zero3",
        "--json",
    ]
    code, output, _ = command(*words, "--sequence-parallel", "4", "--json")
    assert code == 0 and "samples shared by 4" in json.loads(output)["estimated"]
    code, _, message = command(*words, "--sequence-parallel", "4", "--task", "sft")
    assert code == 2 and "sequence_parallel=4 is not predicted with task=sft" in message
