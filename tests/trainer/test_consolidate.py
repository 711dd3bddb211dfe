"""Sharded checkpoints become models again; one of real ZeRO-3 processes does in test_launch.py."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_memopt.errors import InputError
from hf_memopt.trainer.checkpoints.consolidation import consolidate


def tiny():
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=100)
    )


def test_an_fsdp2_checkpoint(tmp_path):
    """In the layout of torch's distributed checkpoints, which accelerate writes; it starts FSDP2 on devices only."""
    import torch.distributed.checkpoint as dcp

    model = tiny()
    source = tmp_path / "checkpoint-1"
    source.mkdir()
    model.config.save_pretrained(source)
    dcp.save({"model": model.state_dict()}, checkpoint_id=source / "pytorch_model_fsdp_0")
    with pytest.raises(InputError, match="add --trusted"):
        consolidate(source, tmp_path / "model")
    assert not (tmp_path / "model").exists()
    files = consolidate(source, tmp_path / "model", trusted=True)
    with pytest.raises(InputError, match="is not an empty folder"):
        consolidate(source, tmp_path / "model", trusted=True)
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
    (tmp_path / "states" / "global_step1").mkdir(parents=True)
    (tmp_path / "states" / "global_step1" / "a_optim_states.pt").touch()  # without the file that says which is latest
    (tmp_path / "latest").write_text("global_step1")  # without states
    for source in (tmp_path / "states", tmp_path):
        with pytest.raises(InputError, match="has no sharded weights"):
            consolidate(source, tmp_path / "model")


def test_a_torn_checkpoint_leaves_nothing(tmp_path):
    broken = tmp_path / "checkpoint-1" / "global_step1"
    broken.mkdir(parents=True)
    (tmp_path / "checkpoint-1" / "latest").write_text("global_step1")
    (broken / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"torn")
    (broken / "zero_pp_rank_0_mp_rank_00_model_states.pt").write_bytes(b"torn")
    with pytest.raises(InputError, match="cannot be read"):
        consolidate(tmp_path / "checkpoint-1", tmp_path / "model", trusted=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
