"""Saved activations in 8 bits: what is taken and what is not, how near gradients stay, and what it takes."""

import gc
import math
import traceback

import pytest
import torch
from conftest import slow
from faults import Strikes
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import llama, train, with_lora
from transformers import AutoConfig, AutoModelForCausalLM

from hf_memopt import InputError, MemoryArguments
from hf_memopt.levers.activation_compression import (
    Compressed,
    Compressor,
    _is_log_sum_exp,
    _quantize,
    compress_activations,
)

SIZES = {"vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LLAMA = {"intermediate_size": 256, "num_key_value_heads": 2}
FAMILIES = {
    "llama": ("llama", LLAMA),
    "eager attention": ("llama", {**LLAMA, "attn_implementation": "eager"}),
    "gpt2": ("gpt2", {}),
    "experts": ("mixtral", {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "window": ("mistral", {**LLAMA, "sliding_window": 32}),
}


def model_of(name: str):
    family, more = FAMILIES[name]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES, **more)).train()


def step(model, half: bool = False):
    torch.manual_seed(1)
    ids = torch.randint(3, 300, (2, 128))
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    grads = [weight.grad.flatten().double() for weight in model.parameters() if weight.grad is not None]
    return loss.detach(), torch.cat(grads)


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("name", "half", "checkpointed"),
    [
        *(("llama", half, checkpointed) for half in (False, True) for checkpointed in (False, True)),
        *((name, both, both) for name in FAMILIES if name != "llama" for both in (False, True)),
    ],
)
def test_the_loss_is_the_same_and_the_gradient_nearly(name, half, checkpointed):
    found = {}
    for compressed in (False, True):
        model = model_of(name)
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if compressed:
            compress_activations(model)
        found[compressed] = step(model, half)
    assert not torch.equal(found[True][1], found[False][1])
    assert found[True][0] == found[False][0]
    assert torch.nn.functional.cosine_similarity(found[True][1], found[False][1], dim=0) >= 0.999


@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 0.27), (torch.bfloat16, 0.53), (torch.float16, 0.53)])
def test_what_it_takes(dtype, share):
    model = model_of("llama").to(dtype)
    compressor = compress_activations(model)
    ids = torch.randint(3, 300, (2, 128))
    out = model(input_ids=ids).logits
    kept = list(compressor._alive.values())
    plain = sum(each.codes.numel() + each.rest.numel() for each in kept) * dtype.itemsize
    assert 0 < sum(part.nbytes for each in kept for part in (each.codes, each.scales, each.rest)) <= share * plain
    del out


def test_what_it_leaves_alone():
    """Weights and views of them, integers, masks, statistics, log-sum-exp, logarithms of probabilities."""
    model = model_of("llama")
    compressor = Compressor()
    compressor.begin(model, (torch.ones(2, 128, dtype=torch.long),))
    weight = model.model.layers[0].mlp.up_proj.weight
    heads = torch.randn(2, 4, 128, 32)
    assert not isinstance(compressor.pack(heads), torch.Tensor)
    sums = torch.randn(2, 128, 4).transpose(1, 2)  # saved right after what belongs to the same heads
    for left in (
        sums,
        weight,
        weight.t(),
        weight[:100],
        weight.to(torch.bfloat16).t(),
        torch.ones(100, 100, dtype=torch.long),
        torch.ones(100, 100, dtype=torch.bool),
        torch.zeros(2, 1, 128, 128),
        torch.randn(10, 10),
        torch.randn(256, 300),
        torch.randn(2, 5000, 1),
        torch.randn(1, 64, 1, 64).expand(2, 64, 3, 64),
        torch.randn(100, 100, dtype=torch.float64),
    ):
        assert compressor.pack(left) is left, left.shape
    for taken in (torch.randn(2, 128, 128), torch.randn(256, 128), torch.randn(2, 4, 128, 128)):
        assert not isinstance(compressor.pack(taken), torch.Tensor), taken.shape


def test_a_log_sum_exp_is_known_by_the_heads_before_it(subtests):
    for shape, heads, is_one in [
        ((2, 4, 128), (2, 4, 128), True),
        ((2, 4, 160), (2, 4, 128), True),  # padded
        ((2, 5, 128), (2, 4, 128), False),
        ((2, 4, 128), (2, 4), False),
        ((4, 256), (256, 4), True),  # of packed rows
        ((256, 4), (256, 4), False),
        ((4, 2), (2, 4, 128), False),
        ((2, 4, 128, 32), (2, 4, 128), False),
        ((4, 256), (), False),
    ]:
        with subtests.test(shape=shape, heads=heads):
            assert _is_log_sum_exp(torch.empty(shape), heads) is is_one


LAYOUTS = {
    "in order": lambda tensor: tensor,
    "turned": lambda tensor: tensor.transpose(1, 2),
    "a part": lambda tensor: tensor[..., : tensor.shape[-1] // 2],
    "from the middle": lambda tensor: tensor[1:],
}


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    layout=st.sampled_from(list(LAYOUTS)),
    last=st.integers(60, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    scale=st.floats(-20, 20),
)
def test_an_element_is_off_by_a_254th_of_its_blocks_largest(seed, layout, last, dtype, scale):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(3, 50, last, generator=generator).mul_(math.exp(scale)).to(dtype)
    whole[0, :20] = 0
    tensor = LAYOUTS[layout](whole)
    compressor = Compressor()
    restored = compressor.unpack(compressor.pack(tensor))
    assert restored.shape == tensor.shape and restored.dtype == dtype
    if layout != "a part":
        assert restored.stride() == tensor.stride()
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
    assert (restored - tensor).abs().max() <= tensor.abs().max() * (1 / 253 + rounding)


def test_blocks_have_their_own_scale():
    tensor = torch.randn(64, 128)
    tensor[5, 7] = 1e6
    compressor = Compressor()
    restored = compressor.unpack(compressor.pack(tensor))
    others = torch.arange(64) != 5
    assert (restored - tensor)[others].abs().max() < 0.03


def test_a_tensor_is_kept_once_and_none_is_mistaken_for_another():
    compressor = Compressor()
    tensor = torch.randn(64, 128)
    first, again, view = (compressor.pack(part)[0] for part in (tensor, tensor.detach(), tensor.view(128, 64)))
    assert first is again is view
    tensor.mul_(2)
    changed = compressor.pack(tensor)[0]
    assert changed is not first and torch.allclose(changed.scales, 2 * first.scales)
    del tensor
    for _ in range(50):  # storages at addresses that were in use before
        fresh = torch.randn(64, 128)
        kept = compressor.pack(fresh)
        assert (compressor.unpack(kept) - fresh).abs().max() < 0.05


def test_what_does_not_fill_a_block_stays_as_it_is():
    tensor = torch.randn(41, 101)
    compressed = Compressed(tensor)
    assert len(compressed.rest) == 41 * 101 % 128
    assert torch.equal(compressed.decompress()[-len(compressed.rest) :], tensor.flatten()[-len(compressed.rest) :])


def test_large_tensors_are_worked_on_in_parts(monkeypatch):
    tensor = torch.randn(64, 256)
    whole = Compressed(tensor)
    monkeypatch.setattr("hf_memopt.levers.activation_compression._AT_ONCE", 1024)
    parts = Compressed(tensor)
    assert torch.equal(whole.codes, parts.codes) and torch.equal(whole.decompress(), parts.decompress())


def test_evaluation_and_generation_do_not_pass_through():
    model = model_of("llama")
    compressor = compress_activations(model)
    model.eval()
    model(input_ids=torch.ones(1, 64, dtype=torch.long)).logits.sum().backward()
    assert not compressor._weights, "no forward pass began"


def test_a_forward_that_fails_leaves_nothing():
    model = model_of("llama")
    compressor = compress_activations(model)
    model.lm_head.register_forward_pre_hook(fail)
    failed = 0
    try:
        step(model)
    except torch.OutOfMemoryError as error:  # dropped at its end, and its frames with it
        failed = len(compressor._alive)
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    assert failed > 5 and not compressor._alive


def fail(*_):
    raise torch.OutOfMemoryError("no memory")


def in_fp32():
    return llama(torch.float32)


def lora_in_fp32():
    return with_lora().float()


@pytest.mark.parametrize("model", [slow(in_fp32), slow(lora_in_fp32)])
def test_runs_out_of_memory_and_goes_on(model, tmp_path, monkeypatch):
    """The same run as one that does not run out; small tensors are taken too, the model has no other."""
    monkeypatch.setattr("hf_memopt.levers.activation_compression._SMALLEST", 128)
    memory = {"activation_compression": "int8"}
    fields = {"optim": "sgd", "learning_rate": 0.1}
    plain = train(tmp_path / "plain", model=model, **fields)
    wanted = train(tmp_path / "compressed", model=model, memory=memory, **fields)
    found = train(
        tmp_path / "struck", Strikes({"forward": {100}, "backward": {150}}), model=model, memory=memory, **fields
    )
    assert len(found.events) == 2
    start = torch.cat([weight.detach().flatten() for weight in model().parameters() if weight.requires_grad])
    for other in (wanted, found):
        moved, moved_plain = other.weights - start, plain.weights - start
        assert torch.nn.functional.cosine_similarity(moved, moved_plain, dim=0) > 0.999
        assert not torch.equal(other.weights, plain.weights), "nothing was compressed"


@pytest.mark.slow
@pytest.mark.needs_compiler  # torch.compile builds its CPU kernels
def test_the_fused_form_is_the_same():
    """torch.compile's kernel, here for the CPU: what runs on CUDA is made from the same function."""
    blocks = torch.randn(300, 128)
    fused = torch.compile(_quantize, dynamic=True)
    codes, scales = fused(blocks)
    wanted, wanted_scales = _quantize(blocks)
    assert torch.allclose(scales, wanted_scales) and (codes.int() - wanted.int()).abs().max() <= 1


def test_bad_settings():
    with pytest.raises(InputError, match=r"unknown activation_compression 'int4'.*Known: int8"):
        MemoryArguments(activation_compression="int4")
