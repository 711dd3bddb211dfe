"""Several rows to a sample: none is lost, none sees another, and the estimator counts the masks that part them."""

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from test_memory_trainer import QUIET, llama
from transformers import AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from hf_memopt import estimate, estimate_trainer
from hf_memopt.data.tokens import IGNORED, answered, pack_best_fit, packed_answers, position_ids
from hf_memopt.estimator.accounting.profiled_peak import allocator_peak


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_every_row_is_in_one_block(sizes):
    rows = [([number] * size, [number] * size) for number, size in enumerate(sizes)]
    blocks = pack_best_fit(rows, 50)
    assert sorted(ids[0] for block in blocks for ids, _ in block) == list(range(len(sizes)))
    assert all(sum(len(ids) for ids, _ in block) <= 50 for block in blocks)
    # Two blocks that are less than half full would have been one.
    assert sum(sum(len(ids) for ids, _ in block) <= 25 for block in blocks) <= 1
    assert len(position_ids([len(ids) for ids, _ in blocks[0]], 50)) == 50


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_loss_is_that_of_the_rows_alone(attention):
    model = llama().train()
    model.set_attn_implementation(attention)
    model.config.use_cache = False  # as the Trainer sets it: beside a cache, rows would not be kept apart
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 60, (size,), generator=generator) for size in (7, 12, 4)]
    items = sum(len(row) - 1 for row in rows)
    alone = sum(model(input_ids=row[None], labels=row[None], num_items_in_batch=items).loss for row in rows)
    labels = [torch.cat([torch.tensor([IGNORED]), row[1:]]) for row in rows]
    filling = torch.zeros(5, dtype=torch.long)
    together = model(
        input_ids=torch.cat([*rows, filling])[None],
        labels=torch.cat([*labels, filling + IGNORED])[None],
        position_ids=torch.tensor([position_ids([7, 12, 4], 28)]),
        num_items_in_batch=items,
    ).loss
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (alone, together)]
    assert torch.allclose(together, alone)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, rtol=0, atol=1e-7)


def test_rows_become_blocks(builtin_model):
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    rows = Dataset.from_list(
        [{"prompt": f"What is {number}? ", "completion": "A number. " * (number % 5 + 1)} for number in range(50)]
    )
    alone = answered(rows, "prompt/completion", tokenizer, 64)
    blocks = packed_answers(rows, "prompt/completion", tokenizer, 64)
    assert len(blocks) < len(alone) / 2
    assert all(len(row[name]) == 64 for row in blocks for name in ("input_ids", "labels", "position_ids"))
    kept = sum(label != IGNORED for row in blocks for label in row["labels"])
    assert kept == sum(label != IGNORED for row in alone for label in row["labels"][1:])
    for row in blocks:
        starts = [place for place, position in enumerate(row["position_ids"]) if position == 0]
        assert all(row["labels"][place] == IGNORED for place in starts)


@pytest.mark.slow
def test_the_estimator_counts_the_masks(tmp_path):
    length = 48
    rows = [
        {
            "input_ids": torch.full((length,), 5),
            "labels": torch.full((length,), 5),
            "position_ids": torch.tensor(position_ids([20, 20], length)),
        }
    ] * 16
    args = TrainingArguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2, optim="adamw_torch", **QUIET)

    def trainer():
        return Trainer(model=llama(torch.float32), args=args, train_dataset=rows, data_collator=default_data_collator)

    measured = allocator_peak(lambda: trainer().train())
    assert estimate_trainer(trainer(), "cpu").peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    found = estimate(llama().config, args, length, "cpu", packed=True)
    assert found.peak_allocated_bytes == pytest.approx(measured, rel=0.01)
    assert estimate(llama().config, args, length, "cpu").peak_allocated_bytes < 0.97 * measured
