"""MLPs over tiles of tokens: the same gradients, with and without adapters and checkpointing, in less memory."""

import pytest
import torch
from conftest import refused
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, estimate
from hf_memopt.engines import engine_named
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.tiled_mlp import is_mlp, tile_mlps

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def llama(intermediate_size=96, **more):
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=intermediate_size, **more)).train()


def gradients(model, size, checkpointed=False, lora=False, dtype=torch.float64):
    model = model.to(dtype)
    if lora:
        torch.manual_seed(1)
        model = add_adapters(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).to(dtype)
    if checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": checkpointed == "reentrant"})
        model.enable_input_require_grads()
    if size:
        tile_mlps(model, size)
    ids = torch.arange(2 * 24).reshape(2, 24) % 64
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.drawn(6)
@pytest.mark.parametrize("checkpointed", [False, "reentrant", "not reentrant"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("size", [7, 24, 47])
def test_gradients_are_the_same(size, lora, checkpointed):
    loss, wanted = gradients(llama(), None, checkpointed, lora)
    tiled, found = gradients(llama(), size, checkpointed, lora)
    assert torch.allclose(tiled, loss, rtol=1e-12) and found.keys() == wanted.keys() and wanted
    for name, gradient in wanted.items():
        assert torch.allclose(found[name], gradient, rtol=1e-10, atol=1e-14), name


def test_fp32():
    _, wanted = gradients(llama(), None, dtype=torch.float32)
    _, found = gradients(llama(), 12, dtype=torch.float32)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_a_tile_as_long_as_the_batch_changes_nothing():
    """Nothing is computed again."""
    model, calls = llama(), []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda *_: calls.append(1))
    gradients(model, 48)
    assert len(calls) == 1


def test_evaluation_is_tiled_too():
    model, lengths = llama().eval(), []
    ids = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        tile_mlps(model, 10)
        model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, inputs, out: lengths.append(len(out)))
        assert torch.allclose(model(input_ids=ids).logits, wanted, atol=1e-6)
    assert lengths == [10, 10, 10, 10, 8]


FAMILIES = [
    GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, resid_pdrop=0.0),
    GPTNeoXConfig(**SMALL | {"num_hidden_layers": 1}, intermediate_size=64),
    Qwen2MoeConfig(
        **SMALL | {"num_hidden_layers": 1},
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=4,
        num_key_value_heads=2,
    ),
]


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.model_type)
def test_other_families(config):
    """A shared expert takes tokens without a batch; routed experts stay as they are."""

    def model():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()  # without dropout

    _, wanted = gradients(model(), None, dtype=torch.float32)
    _, found = gradients(model(), 10, dtype=torch.float32)
    for name, gradient in wanted.items():
        assert (found[name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-9, name


def test_which_modules_are_mlps():
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4))
    assert sum(is_mlp(module) for module in t5.modules()) == 2
    bert = BertLMHeadModel(BertConfig(**SMALL, intermediate_size=64, is_decoder=True))
    with pytest.raises(InputError, match="BertLMHeadModel has no MLP as a module of its own"):
        tile_mlps(bert, 8)


def test_what_is_refused():
    levers = MemoryArguments(mlp_tile_size=64)
    assert "both replace the MLP" in next(refused(levers, {"use_liger_kernel": True}, engine_named("none")))
    with pytest.raises(InputError, match="mlp_tile_size=0 must be above 0"):
        MemoryArguments(mlp_tile_size=0)


def peak(model, size, length=512):
    if size:
        tile_mlps(model, size)
    ids = torch.zeros(1, length, dtype=torch.long)
    return allocator_peak(lambda: model(input_ids=ids, labels=ids).loss.backward())


def test_memory_grows_with_the_tile():
    """Of a wide MLP: one layer's intermediates, as under checkpointing, are a few tiles' instead."""
    peaks = []
    for size in (None, 256, 64):
        model = llama(intermediate_size=1024)
        model.activation_checkpointing_enable({"use_reentrant": False})
        peaks.append(peak(model, size))
    whole, half, tile = peaks
    one = 512 * 1024 * 4  # bytes of one intermediate of the MLP
    assert whole - half >= 1.2 * one
    assert half - tile >= 0.5 * one


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_estimator_sees_it(checkpointing, tmp_path):
    """Measured in a real run against predicted: within 1 %."""
    from test_levers_together import CHECKPOINTED, LENGTH, ROWS, config, trainer_of

    names = ("mlp_tile_size", "checkpointing") if checkpointing else ("mlp_tile_size",)
    fields = {"optim": "adamw_torch", "max_steps": 2}
    measured = allocator_peak(lambda: trainer_of(names, tmp_path, layers=4, **fields).train())
    settings = {"per_device_train_batch_size": ROWS, "max_grad_norm": 0.0, **fields}
    predicted = estimate(
        config(layers=4),
        settings | (CHECKPOINTED if checkpointing else {}),
        LENGTH,
        "cpu",
        memory_args=MemoryArguments(mlp_tile_size=100),
    ).peak_allocated_bytes
    assert abs(predicted / measured - 1) <= 0.01
