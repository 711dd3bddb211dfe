"""Sequence parallelism, which is run and not predicted: what plans and estimates say of it."""

from dataclasses import replace

import pytest
from accelerate import ParallelismConfig
from transformers import AutoConfig

from hf_memopt import InputError
from hf_memopt.estimator import estimate
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.shared_samples import shared_samples_note

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 28, "num_key_value_heads": 4}
CONFIG = AutoConfig.for_model(**MODEL, hidden_size=3584, vocab_size=500, max_position_embeddings=131072)


def _spec(hardware="h100_80gbx8", **changes) -> JobSpec:
    preset = resolve_preset(hardware, "full")
    spec = JobSpec(model="Qwen/Qwen2.5-7B", config=CONFIG, preset=preset, method="full", seq_len=131072)
    return replace(spec, effective_batch_size=32, **changes)


def test_a_plan_without_room_for_a_sample_names_the_command_that_shares_it():
    """28 heads are shared by four of eight devices; the command is what export and the recipe read."""
    note = shared_samples_note(_spec(), None)
    assert "--sequence-parallel 4" in note and "hf-memopt export h100_80gb_x8" in note
    in_host = Choice("zero2", 1, 4, 1.0, "adamw_torch", "bfloat16", inputs_offloaded=True)
    assert shared_samples_note(_spec(), in_host) == note
    assert shared_samples_note(_spec(), replace(in_host, inputs_offloaded=False)) is None
    assert shared_samples_note(_spec(seq_len=2048), None) is None
    assert shared_samples_note(_spec("rtx_4090x2"), None) is None, "a box that export does not know"


def test_the_command_writes_a_job(tmp_path, monkeypatch):
    import shlex

    from hf_memopt.cli import main
    from hf_memopt.recipe.arguments import parse

    words = shlex.split(shared_samples_note(_spec(), None).rpartition(": ")[2])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit, match="0"):
        main()
    started = (tmp_path / "my-run" / "launch.sh").read_text().replace("\\\n", " ").rsplit("pretrain.py ", 1)[1]
    parsed = parse(shlex.split(started.partition(" --output_dir")[0]))
    assert (parsed.recipe.max_length, parsed.recipe.effective_batch_size) == (131072, 32)
    assert parsed.training["per_device_train_batch_size"] == 1
    assert "parallelism_config_sp_size: 4" in (tmp_path / "my-run" / "accelerate.yaml").read_text()


@pytest.mark.parametrize("sizes", [{"sp_size": 2, "sp_backend": "deepspeed"}, {"cp_size": 2}])
def test_estimates_of_shared_samples_are_refused(sizes):
    fields = {"per_device_train_batch_size": 1, "parallelism_config": ParallelismConfig(**sizes)}
    with pytest.raises(InputError, match="is not predicted: leave it out"):
        estimate(CONFIG, fields, 512, "a100_80gb", world_size=2, strategy="zero3")
