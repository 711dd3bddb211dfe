"""A checkpoint that transformers saved under other names goes back into the model it came from."""

import pytest
import torch
import video_models
from small_runs import TINY
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, LlamaConfig, MixtralConfig

from hf_memopt.trainer.checkpoints.load_states import load_renamed


def mixtral():
    return AutoModelForCausalLM.from_config(MixtralConfig(**TINY, num_local_experts=4))


def qwen():
    return AutoModelForImageTextToText.from_config(video_models.qwen2_5_vl()[0])


def llama():
    return AutoModelForCausalLM.from_config(LlamaConfig(**TINY))


@pytest.mark.parametrize(("make", "renamed"), [(qwen, True), (mixtral, True), (llama, False)])
@pytest.mark.parametrize("shards", ["5GB", "20KB"])
def test_weights_come_back(make, renamed, shards, tmp_path):
    saved, model = make(), make()
    saved.save_pretrained(tmp_path, max_shard_size=shards)
    assert load_renamed(model, tmp_path) is renamed  # the others are the Trainer's own affair
    if renamed:
        for name, weight in saved.state_dict().items():
            assert torch.equal(model.state_dict()[name], weight), name


def test_a_folder_without_weights(tmp_path):
    assert load_renamed(llama(), tmp_path) is False
