"""The optimizer in backward: the same weights as after it, gradients that are gone, and what it excludes."""

from types import SimpleNamespace

import pytest
import torch
from conftest import slow
from faults import Strikes
from small_runs import llama, train, with_lora
from test_adam_mini import stop_after

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, TrainingOutOfMemory, estimate
from hf_memopt.levers.features.optimizers import _largest_gradient, step_in_backward

ALONE = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "weight_decay": 0.1}
MEMORY = {"optimizer_in_backward": True}


def in_fp32():
    return llama(torch.float32)


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "optim", ["adamw_torch", slow("adamw_torch_fused"), slow("sgd"), slow("adafactor"), "adamw_8bit"]
)
@pytest.mark.parametrize("model", [llama, with_lora])
def test_runs_are_the_same(model, optim, tmp_path):
    """With a schedule, weight decay and groups."""
    if optim == "adamw_8bit":
        model = in_fp32
    fields = {"model": model, "optim": optim, "lr_scheduler_type": "cosine", "warmup_steps": 2, **ALONE}
    wanted = train(tmp_path / "plain", **fields)
    found = train(tmp_path / "backward", memory=MEMORY, **fields)
    assert found.rate == wanted.rate
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


def test_a_gradient_is_gone_when_the_next_one_comes():
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters())
    step_in_backward(optimizer)
    there = []
    for weight in model.parameters():
        weight.register_hook(lambda _: there.append(sum(other.grad is not None for other in model.parameters())))
    ids = torch.ones(1, 8, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert max(there) == 0 and all(weight.grad is None for weight in model.parameters())
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_sketch_has_the_largest_gradient_alone(subtests):
    for kinds, gradients in [({}, 0), ({"gradients": 9}, 7), ({"gradients": 5}, 5)]:
        with subtests.test(kinds=kinds):
            _largest_gradient(kinds, 0, SimpleNamespace(largest_weight=7), None)
            assert kinds == {"gradients": gradients}


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", slow("adafactor"), slow("adamw_8bit"), slow("sgd")])
def test_an_estimate_has_no_gradients_at_the_step(optim, tmp_path):
    """Of a model whose weights are most of its memory: the estimate held all gradients at once, as usual steps do."""
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=500
    )
    fields = {"optim": optim, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    rows = [{"input_ids": [7] * 16, "labels": [7] * 16}] * 4
    quiet = {"use_cpu": True, "max_steps": 2, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}

    def run(trainer, **more):
        model = AutoModelForCausalLM.from_config(config)
        args = TrainingArguments(str(tmp_path), logging_strategy="no", **fields, **quiet)
        trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator, **more).train()

    levers = MemoryArguments(**MEMORY)
    found = estimate(config, fields, 16, "cpu", memory_args=levers)
    measured = allocator_peak(lambda: run(MemoryTrainer, memory_args=levers))
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert measured < 0.9 * allocator_peak(lambda: run(Trainer))
    weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    assert found.breakdown["gradients"] < weights, "less than a quarter of them"


@pytest.mark.slow
def test_with_adam_mini_and_resumed(tmp_path):
    fields = {"memory": {**MEMORY, "adam_mini": True}, "save_strategy": "steps", "save_steps": 3, **ALONE}
    wanted = train(tmp_path / "plain", **{**fields, "memory": {"adam_mini": True}})
    train(tmp_path / "cut", **fields, prepare=stop_after(3))
    found = train(tmp_path / "cut", **fields, resume=True)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [slow("forward"), "backward"])
def test_running_out_ends_the_run(phase, tmp_path):
    """Weights are changed on the way back: nothing can be taken again; before that, the last good step is saved."""
    with pytest.raises(TrainingOutOfMemory, match="optimizer_in_backward cannot repeat a step") as end:
        train(tmp_path, Strikes({phase: {400}}), memory=MEMORY, **ALONE)
    assert end.value.report["step"] > 0
    assert (end.value.report["checkpoint"] is not None) == (phase == "forward")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=1"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=0"),
    ],
)
def test_refused(fields, why, tmp_path):
    with pytest.raises(InputError, match=why):
        train(tmp_path, memory=MEMORY, **{**ALONE, **fields})
