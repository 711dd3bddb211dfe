"""Checkpointing in part: which layers, which operators, the same gradients, and memory between none and all."""

import pytest
import torch
from conftest import slow
from hypothesis import given
from hypothesis import strategies as st
from small_runs import llama, train, with_lora
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments
from hf_memopt.levers.selective_checkpointing import checkpoint_in_part, is_checkpointed, period_of

CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


@given(ratio=st.floats(0, 1), layers=st.integers(1, 130))
def test_the_chosen_layers_are_spread(ratio, layers):
    chosen = [is_checkpointed(number, ratio) for number in range(layers)]
    assert abs(sum(chosen) - ratio * layers) <= 1
    for start in range(layers):  # any stretch has its share
        assert abs(sum(chosen[start:]) - ratio * (layers - start)) <= 1.2


@pytest.mark.parametrize(
    ("ratio", "period", "chosen"),
    [
        (0, 1, [0, 0, 0, 0]),
        (0.5, 2, [0, 1, 0, 1]),
        (0.25, 4, [0, 0, 0, 1]),
        (0.75, 4, [0, 1, 1, 1]),
        (1, 1, [1, 1, 1, 1]),
    ],
)
def test_the_choice_repeats(ratio, period, chosen):
    assert period_of(ratio) == period
    assert [is_checkpointed(number, ratio) for number in range(8)] == [bool(one) for one in chosen] * 2


def deep():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=8, num_attention_heads=4
    )
    return LlamaForCausalLM(config).train()


def gradient_and_peak(**lever):
    model = deep()
    if lever:
        checkpoint_in_part(model, lever.get("ratio"), lever.get("keeps"))
    ids = torch.randint(3, 60, (2, 256), generator=torch.Generator().manual_seed(1))
    peak = allocator_peak(lambda: model(input_ids=ids, labels=ids).loss.backward())
    return torch.cat([weight.grad.flatten() for weight in model.parameters()]), peak


@pytest.mark.slow
def test_gradients_are_the_same_and_memory_lies_between():
    wanted, none = gradient_and_peak()
    peaks = {"none": none}
    for name, lever in {
        "a quarter": {"ratio": 0.25},
        "half": {"ratio": 0.5},
        "matmuls": {"keeps": "matmuls"},
        "attention": {"keeps": "attention"},
        "all": {"ratio": 1.0},
        "ratio 0": {"ratio": 0.0},
        "half, attention": {"ratio": 0.5, "keeps": "attention"},
    }.items():
        gradient, peaks[name] = gradient_and_peak(**lever)
        assert torch.allclose(gradient, wanted, rtol=0, atol=1e-7), name
    assert peaks["all"] < peaks["attention"] < peaks["matmuls"] < peaks["none"]
    assert peaks["all"] < peaks["half"] < peaks["half, attention"] < peaks["a quarter"] < peaks["none"]
    assert abs(peaks["ratio 0"] - none) < 0.01 * none


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, slow(CHECKPOINTED), slow({"gradient_accumulation_steps": 4})])
@pytest.mark.parametrize("model", [llama, slow(with_lora)])
@pytest.mark.parametrize("memory", [{"checkpoint_ratio": 0.5}, {"checkpoint_keeps": "matmuls"}])
def test_runs_are_the_same(memory, model, fields, tmp_path):
    """Also where the Trainer turns checkpointing on itself, of all layers."""
    chosen = []
    wanted = train(tmp_path / "plain", model=model)
    if "gradient_accumulation_steps" in fields:
        wanted = train(tmp_path / "plain", model=model, **fields)
    found = train(tmp_path / "part", model=model, memory=memory, prepare=chosen.append, **fields)
    layers = [module for module in chosen[0].model.modules() if type(module).__name__ == "LlamaDecoderLayer"]
    flags = [layer.gradient_checkpointing for layer in layers]
    assert flags == ([False, True] if "checkpoint_ratio" in memory else [True, True])
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


def test_refused(tmp_path):
    every = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"every_n_layers": 2}}
    with pytest.raises(InputError, match="every_n_layers=2 and checkpoint_ratio both choose"):
        train(tmp_path, memory={"checkpoint_ratio": 0.5}, **every)
    with pytest.raises(InputError, match="use_reentrant=False"):
        reentrant = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
        train(tmp_path, memory={"checkpoint_keeps": "attention"}, **reentrant)
    with pytest.raises(InputError, match=r"checkpoint_ratio=1.5 must lie between"):
        MemoryArguments(checkpoint_ratio=1.5)
    with pytest.raises(InputError, match="unknown checkpoint_keeps 'attn'"):
        MemoryArguments(checkpoint_keeps="attn")
    with pytest.raises(InputError, match="Linear has no layers to checkpoint"):
        checkpoint_in_part(torch.nn.Linear(2, 2), 0.5, None)
