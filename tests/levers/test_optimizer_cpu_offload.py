"""Optimizer states in host memory. There is no accelerator here: the tests say that the CPU is one."""

import pytest
import torch
from conftest import slow
from small_runs import llama, train, with_lora
from test_adam_mini import stop_after

from hf_memopt import InputError, MemoryArguments, estimate
from hf_memopt.levers import optimizer_cpu_offload

MEMORY = {"optimizer_cpu_offload": True}


@pytest.fixture
def apart(monkeypatch):
    """The weights count as apart from the host's memory."""
    keep = optimizer_cpu_offload.keep_on_host
    monkeypatch.setattr(optimizer_cpu_offload, "keep_on_host", lambda optimizer: keep(optimizer, lambda _: True))


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch_fused", slow("adafactor"), slow("sgd")])
@pytest.mark.parametrize("model", [llama, with_lora])
def test_runs_are_the_same(model, optim, apart, tmp_path):
    held = []
    fields = {"model": model, "optim": optim, "lr_scheduler_type": "cosine", "weight_decay": 0.1}
    wanted = train(tmp_path / "plain", **fields)
    found = train(tmp_path / "offloaded", memory=MEMORY, prepare=held.append, **fields)
    assert found.rate == wanted.rate
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)
    trained = {id(weight) for weight in held[0].model.parameters()}
    stepped = {id(weight) for group in held[0].optimizer.param_groups for weight in group["params"]}
    assert not trained & stepped, "the optimizer has weights of its own"


@pytest.mark.parametrize("name", ["Adafactor", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam"])
def test_every_optimizer_steps_on_its_copies(name):
    """Those too that make their states when they are constructed."""

    def stepped(offloaded: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))
        optimizer = getattr(torch.optim, name)([weight], lr=0.1)
        if offloaded:
            optimizer_cpu_offload.keep_on_host(optimizer, lambda _: True)
        for number in range(3):
            weight.grad = torch.full_like(weight, 0.5 + number)
            optimizer.step()
        assert offloaded != (weight in optimizer.state)
        optimizer.state_dict()  # accelerate asks for it before the first step
        return weight.detach()

    assert torch.equal(stepped(True), stepped(False))


@pytest.mark.slow
def test_a_checkpoint_goes_on(apart, tmp_path):
    fields = {"memory": MEMORY, "save_strategy": "steps", "save_steps": 3}
    wanted = train(tmp_path / "whole", **fields)
    train(tmp_path / "cut", **fields, prepare=stop_after(3))
    found = train(tmp_path / "cut", **fields, resume=True)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_on_a_cpu_it_says_that_it_does_nothing(tmp_path, caplog):
    wanted = train(tmp_path / "plain")
    found = train(tmp_path / "offloaded", memory=MEMORY)
    assert torch.equal(found.weights, wanted.weights)
    assert "optimizer_cpu_offload has no effect here" in caplog.text


@pytest.mark.slow
def test_the_estimator_counts_states_in_host_memory():
    config, fields = llama().config, {"per_device_train_batch_size": 1, "optim": "adamw_torch_fused"}
    here = estimate(config, fields, 32, "rtx_3060")
    there = estimate(config, fields, 32, "rtx_3060", memory_args=MemoryArguments(**MEMORY))
    weights = here.breakdown["parameters"]
    assert there.breakdown["optimizer_states"] == 0
    assert here.peak_allocated_bytes - there.peak_allocated_bytes > weights, "two states, at the peak of the step"
    added = there.host_bytes - here.host_bytes
    assert 2.5 * weights < added < 4.2 * weights, "a copy, a gradient, two states; before, the weights on their way"
    on_cpu = estimate(config, fields, 32, "cpu", memory_args=MemoryArguments(**MEMORY))
    assert on_cpu.peak_allocated_bytes == estimate(config, fields, 32, "cpu").peak_allocated_bytes


@pytest.mark.parametrize(
    ("fields", "memory", "why"),
    [
        ({"optim": "adamw_8bit"}, {}, "use adamw_torch_fused"),
        ({"max_grad_norm": 0.0}, {"optimizer_in_backward": True}, "use one of them"),
    ],
)
def test_refused(fields, memory, why, tmp_path):
    with pytest.raises(InputError, match=why):
        train(tmp_path, memory={**MEMORY, **memory}, **fields)
