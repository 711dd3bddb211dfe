"""Sharded checkpoints become models again."""

import pytest
import torch
from conftest import ROOT, launch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_memopt.errors import InputError
from hf_memopt.training.consolidate import consolidate


def tiny():
    return LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                        num_attention_heads=2, vocab_size=100))  # fmt: skip


def test_a_zero3_checkpoint_of_two_processes(tmp_path, jsonl, builtin_model, command):
    """Written by real DeepSpeed processes; equal to what they gathered at the end, and from_pretrained reads it."""
    rows = jsonl([{"text": f"Line {number} of a text."} for number in range(60)])
    launch(
        ROOT / "accelerate_configs" / "cpu_x2_zero3.yaml", ROOT / "recipes" / "pretrain.py", "--preset", "cpu_x2",
        "--model_name_or_path", builtin_model, "--dataset_name", rows, "--max_length", 32, "--held_out", 0,
        "--max_steps", 2, "--save_strategy", "steps", "--save_steps", 2, "--samples", 0, "--output_dir",
        tmp_path / "out",
    )  # fmt: skip
    checkpoint = tmp_path / "out" / "checkpoint-2"
    code, _, err = command("consolidate", checkpoint, tmp_path / "model")
    assert code == 2 and "--trusted" in err and not (tmp_path / "model").exists()
    code, _, err = command("consolidate", checkpoint, tmp_path / "model", "--trusted")
    assert code == 0, err
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    gathered = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert whole.keys() == gathered.keys()
    assert all(torch.equal(whole[name], gathered[name]) for name in whole)
    assert not list((tmp_path / "model").glob("*.bin"))
    with pytest.raises(InputError, match="is there already"):
        consolidate(checkpoint, tmp_path / "model", trusted=True)


def test_an_fsdp2_checkpoint(tmp_path):
    """In the layout of torch's distributed checkpoints, which accelerate writes; it starts FSDP2 on devices only."""
    import torch.distributed.checkpoint as dcp

    model = tiny()
    source = tmp_path / "checkpoint-1"
    source.mkdir()
    model.config.save_pretrained(source)
    dcp.save({"model": model.state_dict()}, checkpoint_id=source / "pytorch_model_fsdp_0")
    files = consolidate(source, tmp_path / "model", trusted=True)
    assert {"config.json", "model.safetensors"} <= set(files)
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(found[name], weight) for name, weight in model.state_dict().items() if name in found)
    assert len(found) >= len(model.state_dict()) - 1  # a tied weight is kept once


def test_what_is_no_sharded_checkpoint(tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        consolidate(tmp_path / "nowhere", tmp_path / "model")
    tiny().save_pretrained(tmp_path / "whole")
    with pytest.raises(InputError, match="has no sharded weights"):
        consolidate(tmp_path / "whole", tmp_path / "model")


def test_a_torn_checkpoint_leaves_nothing(tmp_path):
    broken = tmp_path / "checkpoint-1" / "global_step1"
    broken.mkdir(parents=True)
    (tmp_path / "checkpoint-1" / "latest").write_text("global_step1")
    (broken / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"torn")
    (broken / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        consolidate(tmp_path / "checkpoint-1", tmp_path / "model", trusted=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
