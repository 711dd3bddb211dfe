"""Copies of real models on fake tensors: what they hold of the originals, and what not."""

import functools
from types import SimpleNamespace

import pytest
import torch
from test_trainers_left_alone import llama
from torch._subclasses.fake_tensor import FakeTensor

from hf_memopt.estimator.tracing.fake_copy import fake_copy, fake_tensor, rebind
from hf_memopt.estimator.tracing.fake_tensors import fake_world
from hf_memopt.estimator.tracing.segments import _recognisable_width, repeated_layers


class Owner:
    def method(self):
        return self


def test_functions_hold_copies_where_they_held_originals():
    old, new, other = Owner(), Owner(), Owner()
    memo = {id(old): new}

    def held(first=other, *, second=other):
        return old, first, second

    def free():
        return other

    def again(depth=1):
        return again(depth - 1) if depth else held()

    def empty():
        return missing

    assert rebind(old, memo) is new and rebind(other, memo) is other and rebind("text", memo) == "text"
    for unchanged in (free, len, empty, other.method, rebind):
        assert rebind(unchanged, memo) is unchanged or rebind(unchanged, memo) == unchanged
    held.about, held.of = old, other
    copied = rebind(held, memo)
    assert copied() == (new, other, other) and copied(1, second=2) == (new, 1, 2) and held()[0] is old
    assert (copied.about, copied.of, copied.__name__) == (new, other, "held")
    assert rebind(held, memo) is copied, "one copy of each"
    assert rebind(old.method, memo)() is new
    partial = rebind(functools.partial(held, old, second=old), {id(old): new})
    assert partial() == (new, new, new)
    assert rebind(again, {id(old): new})(0)[0] is new
    missing = None


def test_a_copy_has_fewer_layers_and_the_originals_flags():
    model = llama(4)
    model.lm_head.weight = model.model.embed_tokens.weight
    model.model.norm.weight.requires_grad_(False)
    model.model.plain, model.model.ids = torch.ones(3), {"a": torch.arange(5), "b": "text"}
    model.model.layers[0].called = lambda: model
    before = {name: (weight.shape, weight.requires_grad) for name, weight in model.named_parameters()}
    for depth, config_depth in ((2, 2), (4, 4)):
        with fake_world("cpu"):
            memo: dict = {}
            copied = fake_copy(model, repeated_layers(model), depth, memo)
            assert len(copied.model.layers) == copied.config.num_hidden_layers == config_depth
            assert getattr(copied.model.layers, "repeats", False) is (depth == 2)
            assert copied.lm_head.weight is copied.model.embed_tokens.weight
            kept = {name: (weight.shape, weight.requires_grad) for name, weight in copied.named_parameters()}
            assert kept.items() <= before.items()
            tensors = (*copied.parameters(), *copied.buffers(), copied.model.plain, copied.model.ids["a"])
            assert all(isinstance(tensor, FakeTensor) for tensor in tensors)
            assert copied.model.ids["b"] == "text" and copied.model.layers[0].called() is copied
    assert len(model.model.layers) == model.config.num_hidden_layers == 4
    assert before == {name: (weight.shape, weight.requires_grad) for name, weight in model.named_parameters()}
    assert model.model.layers[0].called() is model and type(model.model.plain) is torch.Tensor


def test_a_fake_tensor_has_strides_and_kinds():
    streamed = torch.nn.Parameter(torch.ones(2))
    streamed.streamed_on_load = True
    with fake_world("cpu"):
        for tensor, dtype in [
            *((torch.ones(3, 4).t(), torch.float32), (torch.ones(2, dtype=torch.half), torch.bfloat16)),
            *((torch.nn.Parameter(torch.ones(2), False), torch.float32), (streamed, torch.float32)),
        ]:
            fake = fake_tensor(tensor)
            assert (fake.shape, fake.stride(), fake.dtype) == (tensor.shape, tensor.stride(), dtype)
            assert isinstance(fake, torch.nn.Parameter) == isinstance(tensor, torch.nn.Parameter)
            assert fake.requires_grad == tensor.requires_grad
            assert getattr(fake, "streamed_on_load", False) == (tensor is streamed)


@pytest.mark.parametrize("nested", [False, True])
def test_layers_are_the_longest_lists_of_a_models_own(nested):
    """Experts are lists within layers; a configuration says how many layers the text has, not a tower."""
    model = llama(3)
    tower = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))
    model.tower = tower
    if nested:
        for layer in model.model.layers:
            layer.experts = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(3))
    assert repeated_layers(model) == [model.model.layers]
    model.config.num_hidden_layers = 9
    assert repeated_layers(model) == [tower]
    model.model.layers.repeats = True
    assert repeated_layers(model) == [model.model.layers]
    assert repeated_layers(torch.nn.Linear(2, 2)) == []


def test_a_width_that_tells_the_heads_weight_from_logits():
    whole, part = SimpleNamespace(is_floating_point=False), SimpleNamespace(is_floating_point=True)
    for shape, kind, hidden, width in [
        *(((2, 32), whole, 32, 0), ((2, 32), whole, 64, 0), ((2, 32), whole, 2, 0), ((2, 32), whole, 33, 33)),
        ((2, 32), part, 32, 32),
    ]:
        assert _recognisable_width(hidden, {"input_ids": (shape, kind)}) == width
