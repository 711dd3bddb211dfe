"""Batches by tokens: never above the budget, all samples once, as many on every process, and exact resume."""

import random

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from conftest import slow
from faults import Strikes
from hypothesis import given
from hypothesis import strategies as st
from small_runs import Rows, collate, llama, train
from test_adam_mini import stop_after

from hf_memopt import InputError, MemoryArguments, MemoryTrainer, estimate, estimate_trainer
from hf_memopt.levers.token_budget import TokenBudgetBatches, _cuts, samples_within

BUDGET = {"max_tokens_per_batch": 96}


def batches_of(lengths, budget, processes=1, epoch=0):
    sampler = SeedableRandomSampler(range(len(lengths)), data_seed=1)
    sampler.set_epoch(epoch)
    return TokenBudgetBatches(sampler, lengths, budget, processes)


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=300),
    budget=st.integers(200, 2000),
    processes=st.integers(1, 8),
)
def test_every_sample_once_within_the_budget(lengths, budget, processes):
    batches = batches_of(lengths, budget, processes)
    found = list(batches)
    assert len(found) == len(batches)
    assert len(batches) % processes == 0 or max(map(len, found)) == 1
    assert sorted(index for batch in found for index in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[index] for index in batch) <= budget for batch in found)


@given(lengths=st.lists(st.integers(1, 200), min_size=8, max_size=300), processes=st.integers(1, 8))
def test_processes_take_as_many_steps(lengths, processes):
    shards = [BatchSamplerShard(batches_of(lengths, 256, processes), processes, rank) for rank in range(processes)]
    taken = [list(shard) for shard in shards]
    assert {len(one) for one in taken} == {len(shards[0])}
    dealt = sorted(index for one in taken for batch in one for index in batch)
    if (
        len(batches_of(lengths, 256, processes)) % processes
    ):  # single samples that do not come out even: some come twice
        assert set(dealt) == set(range(len(lengths))) and len(dealt) < len(lengths) + processes
    else:
        assert dealt == list(range(len(lengths)))


def test_sorted_lengths_are_divided_where_the_budget_ends():
    for lengths, budget, processes, cuts in [
        ([8, 8, 8, 16], 24, 1, [(0, 3), (3, 4)]),
        ([8, 8, 8, 16], 23, 1, [(0, 2), (2, 3), (3, 4)]),
        ([8, 8, 8, 16], 64, 1, [(0, 4)]),
        ([8, 8, 8, 16], 32, 3, [(0, 1), (1, 3), (3, 4)]),
        ([8, 8, 8, 16], 32, 5, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        ([8, 8, 8, 8], 32, 2, [(0, 2), (2, 4)]),
        ([8], 8, 1, [(0, 1)]),
    ]:
        assert sorted(_cuts(lengths, budget, processes)) == cuts, (lengths, budget, processes)


def test_samples_of_one_length_within_a_budget():
    for budget, length, samples in [(64, 8, 8), (63, 8, 7), (64, 9, 4), (7, 8, 1)]:
        assert samples_within(budget, length) == samples, (budget, length)


def test_little_is_padded_and_epochs_differ():
    generator = random.Random(0)
    lengths = [int(generator.lognormvariate(5, 0.8)) + 1 for _ in range(2000)]
    batches = batches_of(lengths, 8192)
    tokens, padded = sum(lengths), sum(len(one) * max(lengths[index] for index in one) for one in batches)
    assert padded < 1.1 * tokens
    # With as many samples in every batch, of which the longest must fit.
    shuffled = random.Random(1).sample(lengths, len(lengths))
    size = 8192 // max(lengths)
    fixed = [shuffled[start : start + size] for start in range(0, 2000, size)]
    assert sum(len(one) * max(one) for one in fixed) > 1.3 * tokens and len(fixed) > 3 * len(batches)
    first, again, later = (list(batches_of(lengths, 8192, epoch=epoch)) for epoch in (0, 0, 1))
    assert first == again != later
    assert {tuple(sorted(one)) for one in first} != {tuple(sorted(one)) for one in later}, "samples change places"


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [slow(1), 2])
def test_a_run_resumes_exactly(accumulation, tmp_path):
    fields = {
        "memory": BUDGET,
        "gradient_accumulation_steps": accumulation,
        "max_steps": 18,
        "save_strategy": "steps",
        "save_steps": 11,
    }
    wanted = train(tmp_path / "whole", **fields)
    rows = Rows().rows
    assert all(len(one) * max(len(rows[index]) for index in one) <= 96 for one in wanted.seen)
    assert len({len(one) for one in wanted.seen}) > 2, "batches differ in samples"
    train(tmp_path / "cut", **fields, prepare=stop_after(11))
    found = train(tmp_path / "cut", **fields, resume=True)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


@pytest.mark.slow
def test_two_seeds_are_two_orders(tmp_path):
    def order(folder, **fields):
        return train(tmp_path / folder, memory=BUDGET, **fields).seen

    first, again, other = order("a", seed=1), order("b", seed=1), order("c", seed=2)
    assert first == again != other
    assert order("d", seed=1, data_seed=5) == order("e", seed=1, data_seed=5) != first


def test_the_order_of_the_batches_alone_follows_the_seed():
    lengths = [8 * length for length in range(1, 40)]  # no two alike: nothing but the batches' order can change
    orders = [list(TokenBudgetBatches(range(39), lengths, 312, seed=seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_workers_are_seeded_as_the_trainers(tmp_path):
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        remove_unused_columns=False,
        report_to="none",
        dataloader_num_workers=2,
        dataloader_in_order=False,
    )
    given = {"model": llama(), "args": args, "train_dataset": Rows(), "data_collator": collate}
    plain = Trainer(**given).get_train_dataloader()
    ours = MemoryTrainer(**given, memory_args=MemoryArguments(**BUDGET)).get_train_dataloader()
    assert ours.worker_init_fn.func is plain.worker_init_fn.func
    assert ours.worker_init_fn.keywords == plain.worker_init_fn.keywords
    assert (ours.num_workers, ours.in_order) == (plain.num_workers, plain.in_order)


@pytest.mark.slow
def test_it_goes_on_after_running_out_and_probes(tmp_path):
    wanted = train(tmp_path / "plain", memory=BUDGET)
    found = train(tmp_path / "struck", Strikes({"forward": {100}, "backward": {150}}), memory=BUDGET)
    assert len(found.events) == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)
    probed = train(tmp_path / "probed", memory={**BUDGET, "probe_worst_batch": True})
    (event,) = probed.events
    rows, tokens = event["shapes"]["input_ids"]
    assert rows * tokens > 80
    assert torch.equal(probed.weights, wanted.weights)


@pytest.mark.slow
def test_the_estimator_counts_the_budget(tmp_path):
    from transformers import TrainingArguments

    config = llama().config
    budget = MemoryArguments(max_tokens_per_batch=512)
    wanted = estimate(config, {"per_device_train_batch_size": 8}, 64, "cpu")
    assert estimate(config, {}, 64, "cpu", memory_args=budget).peak_allocated_bytes == wanted.peak_allocated_bytes
    assert samples_within(100, 90) == 1
    found = {}
    for name, fields, memory in (("rows", {"per_device_train_batch_size": 3}, {}), ("tokens", {}, BUDGET)):
        args = TrainingArguments(str(tmp_path), use_cpu=True, remove_unused_columns=False, report_to="none", **fields)
        trainer = MemoryTrainer(
            model=llama(),
            args=args,
            train_dataset=Rows(),
            data_collator=collate,
            memory_args=MemoryArguments(**memory),
        )
        found[name] = estimate_trainer(trainer, "cpu").peak_allocated_bytes
    assert found["tokens"] == found["rows"], "three of the longest samples, padded to 32"


def test_refused(tmp_path):
    with pytest.raises(InputError, match=r"max_tokens_per_batch=16: sample \d+ has 2\d tokens; raise it, or cut"):
        train(tmp_path, memory={"max_tokens_per_batch": 16})
    with pytest.raises(InputError, match="leave train_sampling_strategy out"):
        train(tmp_path, memory=BUDGET, train_sampling_strategy="group_by_length")
    with pytest.raises(InputError, match="use one of them"):
        train(tmp_path, memory={**BUDGET, "max_batch_size": 8})

    def stream(trainer):
        trainer.train_dataset = iter(Rows())

    with pytest.raises(InputError, match="a stream has none, leave it out"):
        train(tmp_path, memory=BUDGET, prepare=stream)
