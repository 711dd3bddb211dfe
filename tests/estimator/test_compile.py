"""Levers under torch.compile, with the compiler that is here: it keeps less where asked to, and computes the same."""

import pytest
import torch
from test_levers_together import trainer_of

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, estimate, get_preset


@pytest.fixture(autouse=True)
def _as_it_was():
    before = torch._functorch.config.activation_memory_budget
    yield
    torch._functorch.config.activation_memory_budget = before
    torch._dynamo.reset()


def compiled(folder, **memory):
    """The peak of a run with what compiling takes, and its loss."""
    losses = []

    def run():
        trainer = trainer_of((), folder, layers=2, torch_compile=True, memory=memory)
        trainer.train()
        losses.append(trainer.state.log_history[-1]["train_loss"])

    torch._dynamo.reset()
    return allocator_peak(run), losses[-1]


@pytest.mark.slow
@pytest.mark.needs_compiler  # torch.compile builds its CPU kernels
def test_the_compiler_keeps_less_when_told_to(tmp_path):
    whole, loss = compiled(tmp_path)
    small, same = compiled(tmp_path, compile_memory_budget=0.1)
    assert small < 0.97 * whole
    assert same == pytest.approx(loss, rel=1e-5)


def test_the_mode_reaches_the_compiler(tmp_path):
    """Through preset, recipe's arguments, TrainingArguments and accelerate; nothing is compiled yet."""
    args = get_preset("cpu").training_arguments(tmp_path, torch_compile_mode="max-autotune-no-cudagraphs")
    assert args.torch_compile, "the mode alone turns the compiler on"
    trainer = trainer_of((), tmp_path, torch_compile_mode="max-autotune-no-cudagraphs")
    assert trainer.accelerator.state.dynamo_plugin.mode == "max-autotune-no-cudagraphs"
    with pytest.raises(InputError, match="unknown torch_compile_mode 'fastest'"):
        get_preset("cpu").training_arguments(tmp_path, torch_compile_mode="fastest")
    with pytest.raises(InputError, match="torch_compile=False and torch_compile_mode='default': leave one"):
        get_preset("cpu").training_arguments(tmp_path, torch_compile=False, torch_compile_mode="default")


@pytest.mark.slow
def test_cuda_graphs_and_recovery():
    fields = {"torch_compile_mode": "max-autotune"}
    with pytest.raises(InputError, match="use max-autotune-no-cudagraphs, or set oom_recovery=False"):
        estimate("smollm2-135m", fields, 64, "h100_80gb", memory_args=MemoryArguments())
    for memory, hardware, said in (
        (MemoryArguments(oom_recovery=False), "h100_80gb", True),
        (None, "h100_80gb", True),
        (MemoryArguments(), "cpu", False),
    ):
        notes = estimate("smollm2-135m", fields, 64, hardware, memory_args=memory).notes
        assert any("records CUDA graphs for every shape" in note for note in notes) is said
        assert any("traced without torch_compile" in note for note in notes)


def test_refused(tmp_path):
    trainer = trainer_of((), tmp_path)
    for memory, fields, why in (
        ({"compile_memory_budget": 0.5}, {"torch_compile": False}, "set torch_compile=True"),
        ({"activation_compression": "int8"}, {"torch_compile": True}, "leave activation_compression out"),
    ):
        for name, value in fields.items():
            setattr(trainer.args, name, value)
        with pytest.raises(InputError, match=why):
            MemoryTrainer(model=trainer.model, args=trainer.args, memory_args=MemoryArguments(**memory))
