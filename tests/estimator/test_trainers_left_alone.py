"""estimate_trainer leaves the trainer, its models and the process as they were."""

import gc
import logging
import os
import random
import warnings
from collections import defaultdict
from typing import ClassVar

import numpy
import pytest
import test_trl_estimates
import torch
from conftest import slow
from torch._subclasses.fake_tensor import FakeTensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from hf_memopt import InputError, estimate_trainer
from hf_memopt.estimator.tracing.process_state import process_state_kept

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def llama(layers=2):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 100}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def rows():
    return [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 8


class Scales:
    """A helper of the user's own that keeps what it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, loss):
        self.seen.append(loss)
        return loss


class Keeps(Trainer):
    """Appends what it computes to whatever it has."""

    shared: ClassVar[list] = []
    by_name: ClassVar[defaultdict] = defaultdict(list)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.nested, self.scale = [], {"a": [[]], "b": defaultdict(list)}, Scales()
        self.teacher, self.steps = llama(), 0

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        outputs = model(**inputs)
        loss = outputs.loss + 0 * self.teacher(**inputs).loss
        self.steps += 1
        self.losses.append(loss)
        self.shared.append(loss)
        self.by_name["loss"].append(loss)
        self.nested["a"][0].append(loss)
        self.nested["b"]["c"].append(loss)
        return (self.scale(loss), outputs) if return_outputs else self.scale(loss)


def keeping_trainer(folder, **fields):
    args = TrainingArguments(str(folder), max_steps=2, use_cpu=True, report_to="none", **fields)
    return Keeps(llama(), args, train_dataset=rows(), eval_dataset=rows())


def snapshot(value, seen=None, path="trainer"):
    """Everything reachable from a trainer through attributes and containers: path -> what is there."""
    seen = {} if seen is None else seen
    if id(value) in seen:
        return {}
    seen[id(value)] = value  # kept, so that no other object gets its id
    assert not isinstance(value, FakeTensor), path
    if isinstance(value, torch.Tensor):
        return {path: (value.shape, value.dtype, float(value.detach().double().sum()), value.grad is None)}
    if isinstance(value, str | int | float | type(None)):
        return {path: value}
    found = {path: (type(value), len(value) if hasattr(value, "__len__") else None)}
    if isinstance(value, dict):
        parts = {str(key): part for key, part in value.items()}
    elif isinstance(value, list | tuple | set):
        parts = dict(enumerate(value))
    else:
        parts = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
    for name, part in parts.items():
        found |= snapshot(part, seen, f"{path}.{name}")
    return found


def process():
    generators = (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    collection = (gc.isenabled(), gc.get_freeze_count() > 0)  # frozen objects may die
    return generators, collection, logging.root.manager.disable, list(warnings.filters), dict(os.environ)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"eval_strategy": "steps", "eval_steps": 1}, {"bf16": True}])
def test_a_trainer_that_keeps_lists(tmp_path, fields):
    trainer = keeping_trainer(tmp_path, **fields)
    trainer.accelerator._dataloaders.append("a loader that was prepared before")
    estimate_trainer(trainer, "cpu")  # imports what an estimate needs
    before, around = snapshot(trainer), process()
    estimate_trainer(trainer, "a100_80gb")
    assert snapshot(trainer) == before
    assert process() == around
    assert Keeps.shared == [] and not Keeps.by_name
    if not fields:
        trainer.accelerator._dataloaders.clear()
        trainer.train()
        assert trainer.steps == len(Keeps.shared) == 2
        Keeps.shared.clear()
        Keeps.by_name.clear()


class Pair(tuple):
    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


def test_a_trainer_that_holds_a_logger_a_file_and_pairs(tmp_path):
    trainer, logger = keeping_trainer(tmp_path), logging.getLogger("one of the user's")
    logger.addHandler(logging.NullHandler())
    with open(tmp_path / "log", "w") as file:
        trainer.log_file, trainer.own_logger, trainer.pairs = file, logger, [Pair(1, 2), Pair([], [])]
        attributes, of_root = dict(vars(logger)), dict(vars(logging.root))
        estimate_trainer(trainer, "cpu")
        assert {name: id(value) for name, value in vars(logger).items()} == {k: id(v) for k, v in attributes.items()}
        assert all(vars(logging.root)[name] is value for name, value in of_root.items())
        assert trainer.log_file is file and trainer.own_logger is logger


@pytest.mark.slow
@pytest.mark.parametrize("case", ["SFT", slow("DPO"), slow("KTO"), slow("reward")])
def test_trainers_of_trl(case, tmp_path):
    trainer = test_trl_estimates.make(tmp_path, case)
    estimate_trainer(trainer, "cpu")
    before, around = snapshot(trainer), process()
    estimate_trainer(trainer, "a100_80gb")
    assert snapshot(trainer) == before
    assert process() == around


def test_an_error_that_a_library_raises_for_the_users_line(tmp_path):
    class NoTargets(Keeps):
        def compute_loss(self, model, inputs, **kwargs):
            return torch.nn.functional.cross_entropy(model(**inputs).logits, None)

    trainer = NoTargets(
        llama(), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"), train_dataset=rows()
    )
    line = r"test_trainers_left_alone.py, line \d+ \(raised in functional.py:\d+\): TypeError: cross_entropy_loss"
    with pytest.raises(InputError, match=line):
        estimate_trainer(trainer, "cpu")


def test_after_a_failure(tmp_path):
    class Fails(Keeps):
        def compute_loss(self, model, inputs, **kwargs):
            super().compute_loss(model, inputs)
            raise KeyError("labels of mine")

    args = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none")
    trainer = Fails(llama(), args, train_dataset=rows())
    before, around = snapshot(trainer), process()
    with pytest.raises(InputError, match=r"test_trainers_left_alone.py, line \d+: KeyError: 'labels of mine'"):
        estimate_trainer(trainer, "cpu")
    assert snapshot(trainer) == before
    assert process() == around


def test_a_trace_draws_the_same_numbers_whatever_its_process_drew():
    """By which TRL shuffles completions: two estimates of a job were off by a token of one of them."""
    drawn = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with process_state_kept():
            drawn.append(torch.randperm(64).tolist())
        assert torch.initial_seed() == seed
    assert drawn[0] == drawn[1]
