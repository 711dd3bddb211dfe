"""Frozen modules save nothing where nobody takes their gradients."""

import pytest
import torch
from conftest import slow
from small_runs import llama, train, with_lora

from hf_memopt.levers.frozen_modules import run_frozen_without_grad


class Tower(torch.nn.Module):
    """A frozen tower whose embedding is made to require gradients, before a head that is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tower = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4))
        )
        self.tower.requires_grad_(False)
        self.tower[0].register_forward_hook(lambda module, inputs, out: out.requires_grad_(True))
        self.head = torch.nn.Linear(8, 2)

    def forward(self, pixels):
        return self.head(self.tower(pixels))


def saved(run) -> list:
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        run()
    return kept


def test_a_frozen_tower_saves_nothing():
    plain, model = Tower(), Tower()
    run_frozen_without_grad(model)
    pixels = torch.randn(3, 8)
    assert len(saved(lambda: plain(pixels))) > 5
    assert len(saved(lambda: model(pixels))) == 1  # the head's input
    assert torch.equal(model(pixels), plain(pixels))
    for one in (plain, model):
        one(pixels).sum().backward()
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)


@pytest.mark.parametrize("inputs", ["tensor", "thawed"])
def test_it_is_asked_at_every_call(inputs):
    """An input that needs a gradient gets it; so do weights that are thawed later."""
    model = torch.nn.ModuleDict(
        {"frozen": torch.nn.Bilinear(4, 4, 4).requires_grad_(False), "head": torch.nn.Linear(4, 1)}
    )
    run_frozen_without_grad(model)
    frozen = model["frozen"]
    first = torch.randn(2, 4, requires_grad=inputs != "thawed")
    if inputs == "thawed":
        assert not frozen(first, first).requires_grad
        frozen.weight.requires_grad_(True)
    out = model["head"](frozen(first, first))
    out.sum().backward()
    assert (first if inputs == "tensor" else frozen.weight).grad.abs().sum() > 0


def test_containers_are_looked_into():
    class Adds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, parts, more=None):
            return sum(parts) * self.weight + (more["last"] if more else 0)

    model = torch.nn.ModuleDict({"adds": Adds(), "head": torch.nn.Linear(4, 1)})
    run_frozen_without_grad(model)
    needed = torch.ones(4, requires_grad=True)
    assert model["adds"]([torch.ones(4), needed]).requires_grad
    assert model["adds"]([torch.ones(4)], more={"last": needed}).requires_grad
    assert not model["adds"]([torch.ones(4)]).requires_grad


CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, CHECKPOINTED])
@pytest.mark.parametrize("model", [slow(llama), with_lora])
def test_runs_are_the_same(model, fields, tmp_path):
    wanted = train(tmp_path / "plain", model=model, memory={"frozen_without_grad": False}, **fields)
    found = train(tmp_path / "without", model=model, **fields)
    assert torch.equal(found.weights, wanted.weights)
