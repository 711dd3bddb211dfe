"""Adam-mini: its blocks, its update against a plain rendering of the paper's, its states, and that it learns."""

import pytest
import torch
from conftest import slow
from faults import Strikes
from small_runs import llama, train, with_lora
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from hf_memopt.levers.adam_mini import AdamMini, weight_blocks

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}


def blocks(family: str, **more) -> dict[str, tuple[int, ...]]:
    """Name -> how many second moments a weight has, by dimension."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more))
    names = {weight: name for name, weight in model.named_parameters()}
    return {
        names[weight]: tuple(1 if dim in within else size for dim, size in enumerate(shape))
        for weight, (shape, within) in weight_blocks(model).items()
    }


def test_blocks_are_the_papers():
    found = blocks("llama", intermediate_size=32, num_key_value_heads=2)
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (64, 1)  # a token
    layer = "model.layers.0."
    assert found[layer + "self_attn.q_proj.weight"] == (4, 1, 1)  # a head
    assert found[layer + "self_attn.k_proj.weight"] == (2, 1, 1)
    assert found[layer + "self_attn.v_proj.weight"] == (8, 1)  # a neuron
    assert found[layer + "self_attn.o_proj.weight"] == (16, 1)
    assert found[layer + "mlp.up_proj.weight"] == (32, 1)
    assert found["model.norm.weight"] == (1,)  # a vector


def test_transposed_weights_and_experts_have_neurons_too():
    assert blocks("gpt2")["transformer.h.0.mlp.c_fc.weight"] == (1, 64)
    experts = blocks("mixtral", intermediate_size=32, num_local_experts=4, num_key_value_heads=2)
    assert experts["model.layers.0.mlp.experts.gate_up_proj"] == (4, 64, 1)


def test_the_update_is_the_papers():
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 8, dtype=torch.float64))
    shape, within = (3, 2, 8), (1, 2)
    plain, mean, square = weight.detach().clone(), torch.zeros(6, 8).double(), torch.zeros(3, 1, 1).double()
    optimizer = AdamMini([weight], {weight: (shape, within)}, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    for step in range(1, 6):
        gradient = torch.randn(6, 8, dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient
        square = 0.9 * square + 0.1 * gradient.view(shape).square().mean((1, 2), keepdim=True)
        plain -= 0.1 * 0.2 * plain
        rate = 0.1 / (1 - 0.8**step) / ((square / (1 - 0.9**step)).sqrt() + 1e-6)
        plain -= (rate * mean.view(shape)).view(6, 8)
    assert torch.allclose(weight, plain, rtol=0, atol=1e-7)  # its second moments are in fp32


def test_heads_of_a_configuration_without_their_size():
    """hidden_size is divided among them; other outputs are neurons."""
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model("bert", **SIZES, intermediate_size=32))
    attention = model.encoder.layer[0].attention
    found = weight_blocks(model)
    assert found[attention.self.query.weight] == ((4, 4, 16), (1, 2))
    assert found[attention.self.value.weight] == ((16, 16), (1,))
    assert found[attention.self.query.bias] == ((16,), (0,))


def test_states_take_half_of_adams():
    model = llama(torch.float32)
    optimizer = AdamMini(model.parameters(), weight_blocks(model))
    model(input_ids=torch.ones(1, 8, dtype=torch.long), labels=torch.ones(1, 8, dtype=torch.long)).loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    per_weight = sum(state.numel() * 4 for state in states) / sum(weight.numel() for weight in model.parameters())
    assert 4 < per_weight < 4.4  # bytes; Adam has 8


@pytest.mark.slow
@pytest.mark.parametrize("model", [llama, slow(with_lora)])
def test_it_learns_and_goes_on_after_running_out(model, tmp_path):
    fields = {
        "model": model,
        "memory": {"adam_mini": True},
        "max_steps": 8,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }
    wanted = train(tmp_path / "plain", **fields)
    assert wanted.logs[-1] < wanted.logs[0]
    found = train(tmp_path / "struck", Strikes({"forward": {100}, "optimizer": {20}}), **fields)
    assert len(found.events) == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_a_checkpoint_goes_on(tmp_path):
    fields = {"memory": {"adam_mini": True}, "save_strategy": "steps", "save_steps": 3}
    wanted = train(tmp_path / "whole", **fields, max_steps=5)
    train(tmp_path / "cut", **fields, max_steps=5, prepare=stop_after(3))
    found = train(tmp_path / "cut", **fields, max_steps=5, resume=True)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


def stop_after(step: int):
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step >= step

    return lambda trainer: trainer.add_callback(Stop())
