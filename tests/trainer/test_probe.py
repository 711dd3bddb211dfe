"""The worst batch tried before the first step, and a run under a real limit of the allocator."""

import json
from functools import wraps
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from conftest import run, run_forked
from faults import Strikes
from small_runs import OOM, Rows, collate, llama, train
from torch.utils.data import BatchSampler
from transformers import Trainer, TrainingArguments

from hf_memopt import MemoryArguments, TrainingOutOfMemory
from hf_memopt.trainer.data_loading import batch_order
from hf_memopt.trainer.step.probe import worst_batch


def probing(trainer):
    trainer.memory_args = MemoryArguments(probe_worst_batch=True)


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "adafactor", "adamw_8bit", "sgd"])
def test_a_probe_leaves_no_trace(optim, tmp_path):
    """Bit for bit, dropout and weight decay included; optimizer states and schedule too, or the runs would part."""

    def dropping():
        return llama(torch.float32, dropout=0.2)

    fields = {"optim": optim, "weight_decay": 0.1, "model": dropping}
    wanted = train(tmp_path / "plain", kind=Trainer, **fields)
    found = train(tmp_path / "probed", prepare=probing, **fields)
    assert [event["event"] for event in found.events] == ["worst_batch_fits"]
    assert torch.equal(found.weights, wanted.weights)
    assert found.rate == wanted.rate


@pytest.mark.slow
def test_the_worst_batch_of_the_epoch_is_found(tmp_path):
    found = train(tmp_path, prepare=probing, max_steps=5)
    (event,) = found.events
    first_epoch = found.seen[1:11]  # the first one seen is the probe's
    rows = Rows()

    def cost(batch):
        return len(batch) * max(len(rows[index]["input_ids"]) for index in batch)

    assert event["dataset_indices"] == found.seen[0] == max(first_epoch, key=cost)


@pytest.mark.slow
def test_the_probe_picks_the_micro_batch(tmp_path):
    def prepare(trainer):
        probing(trainer)
        forward = trainer.model.forward

        @wraps(forward)
        def limited(input_ids, **kwargs):
            if input_ids.numel() > 60:
                raise torch.OutOfMemoryError(OOM)
            return forward(input_ids=input_ids, **kwargs)

        trainer.model.forward = limited

    wanted = train(tmp_path / "plain", kind=Trainer)
    found = train(tmp_path / "probed", prepare=prepare)
    assert all(event["step"] == 0 for event in found.events), "nothing ran out after the probe"
    assert found.events[-1]["event"] == "worst_batch_fits" and found.events[-1]["samples_at_once"] == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_what_can_never_fit_ends_before_the_first_step(tmp_path):
    strikes = Strikes({"optimizer": set(range(1, 1000))})
    with pytest.raises(TrainingOutOfMemory) as end:
        train(tmp_path, strikes, prepare=probing)
    assert end.value.report["step"] == 0 and end.value.report["stage"] == "optimizer"
    assert not list(tmp_path.glob("checkpoint-*"))


def test_lengths_of_arrow_tables_and_lists():
    from datasets import Dataset

    from hf_memopt.data.sample_batches import sample_lengths

    rows = [{"input_ids": [1] * length} for length in (3, 9, 5)]
    table = Dataset.from_list(rows)
    assert sample_lengths(table) == sample_lengths(rows) == [3, 9, 5]
    assert sample_lengths(table.select([2, 0])) == [5, 3]
    assert sample_lengths(Dataset.from_dict({"length": [4, 6]})) == [4, 6]
    assert worst_batch(torch.utils.data.DataLoader(rows, batch_size=2), 0) == [0, 1]
    shuffled = torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True)
    assert worst_batch(shuffled, 0) == [1, 2], "the order is not known: the longest ones together"
    shuffled.total_batch_size = 1  # of accelerate's loaders, where a batch has samples of several processes
    assert worst_batch(shuffled, 0) == [1] and worst_batch(SimpleNamespace(dataset=iter(rows)), 0) is None


@pytest.mark.parametrize("shards", [False, True])
def test_the_order_of_an_epoch_is_read_from_a_copy(shards):
    def sampler(epoch):
        made = SeedableRandomSampler(range(9), data_seed=5)
        made.set_epoch(epoch)
        batches = BatchSampler(made, 2, drop_last=False)
        return made, BatchSamplerShard(batches, 2, 1) if shards else batches

    own, batches = sampler(0)
    loader = torch.utils.data.DataLoader(range(9), batch_sampler=batches)
    orders = [list(batch_order(loader, epoch)) for epoch in range(3)]
    assert orders == [list(sampler(epoch)[1]) for epoch in range(3)] and orders[0] != orders[1]
    assert own.epoch == 0 and list(batch_order(loader, 0)) == orders[0]
    lengths = [{"input_ids": [1] * (index + 1)} for index in range(9)]
    for epoch in range(2):
        heaviest = max(orders[epoch], key=lambda batch: len(batch) * (max(batch) + 1))
        by_length = torch.utils.data.DataLoader(lengths, batch_sampler=sampler(0)[1])
        assert worst_batch(by_length, epoch) == heaviest


@pytest.mark.slow
def test_a_real_limit_of_the_allocator(tmp_path):
    """RLIMIT_AS: plain Trainer ends with an exception, MemoryTrainer with the losses of an unlimited run."""
    script = Path(__file__).parents[1] / "limited_memory.py"

    def limited(kind):
        return run("python", script, kind, tmp_path / kind, 160, env={"MALLOC_ARENA_MAX": "1"})

    wanted = json.loads(run_forked("python", script, "Trainer", tmp_path / "whole").stdout.splitlines()[-1])["losses"]
    failed = limited("Trainer")
    assert failed.returncode == 1 and "DefaultCPUAllocator: can't allocate memory" in failed.stderr
    survived = limited("MemoryTrainer")
    assert survived.returncode == 0, survived.stderr[-3000:]
    found = json.loads(survived.stdout.splitlines()[-1])
    assert found["losses"] == pytest.approx(wanted, abs=1e-5)
    assert found["events"] and found["events"][0]["event"] == "oom_recovered"


def test_batches_stay_on_the_host_until_they_run(tmp_path):
    """On the device `meta`, which stands for one: only there can it be seen on a CPU that nothing is moved early."""
    from hf_memopt import MemoryTrainer

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", remove_unused_columns=False)
    trainer = MemoryTrainer(model=llama(), args=args, train_dataset=Rows(), data_collator=collate)
    plain = Trainer(model=llama(), args=args, train_dataset=Rows(), data_collator=collate)
    for found, device in ((plain, "meta"), (trainer, "cpu")):
        found.accelerator.state.device = torch.device("meta")
        loader = iter(found.get_train_dataloader())
        batches, _ = found.get_batch_samples(loader, 3, torch.device("meta"))
        assert {batch["input_ids"].device.type for batch in batches} == {device}


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [{}, {"eval_strategy": "steps", "eval_steps": 1}], ids=["trains", "evaluates"])
def test_a_memory_trainer_can_be_estimated(tmp_path, evaluation):
    from hf_memopt import MemoryTrainer, estimate_trainer

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none", remove_unused_columns=False, **evaluation)
    given = {"args": args, "train_dataset": Rows(), "eval_dataset": Rows(), "data_collator": collate}
    found = estimate_trainer(
        MemoryTrainer(model=llama(), memory_args=MemoryArguments(probe_worst_batch=True), **given)
    )
    wanted = estimate_trainer(Trainer(model=llama(), **given))
    assert found.peak_allocated_bytes == pytest.approx(wanted.peak_allocated_bytes, rel=0.001)
