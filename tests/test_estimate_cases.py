"""Jobs whose memory is decided by what a plain look misses: padding, kept logits, the allocator's setting."""

import pytest
import torch

from hf_memopt.estimator import estimate_trainer
from hf_memopt.estimator.accounting.profiled_peak import allocator_peak
from hf_memopt.estimator.largest_batch import largest_batch


def _collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    values = {"input_ids": 5, "labels": 5, "attention_mask": 1}
    lengths = [len(row["input_ids"]) for row in rows]
    return {
        name: torch.tensor([[values[name]] * length + [fill[name]] * (longest - length) for length in lengths])
        for name in fill
    }


def _trainer(folder, lengths, **more):
    """A trainer of a model with one key head for eight query heads: sdpa repeats them where there is a mask."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=1,
        intermediate_size=128,
    )
    fields = {"per_device_train_batch_size": 4, "max_steps": 2, "activation_checkpointing": False}
    args = TrainingArguments(
        str(folder),
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        remove_unused_columns=False,
        **fields | more.pop("fields", {}),
    )
    data = [{"input_ids": [5] * length} for length in lengths]
    return Trainer(LlamaForCausalLM(config), args, train_dataset=data, data_collator=_collate, **more)


@pytest.mark.parametrize(
    ("lengths", "real"),
    [
        ([128, 127] * 16, [128, 128, 128, 127] * 8),  # the four longest have no padding, most batches have
        ([128] * 31 + [90], [128, 128, 128, 90] * 8),  # one row of the data is enough
        ([128, 127, 127, 127] * 4, [128, 127, 127, 127] * 4),
        ([128] * 32, [128] * 32),  # never padded
    ],
    ids=["two lengths", "one shorter", "sampled", "one length"],
)
def test_the_longest_batch_has_the_padding_that_real_ones_have(lengths, real, tmp_path):
    found = estimate_trainer(_trainer(tmp_path, lengths), "cpu")
    fields = {"train_sampling_strategy": "sequential"}
    truth = allocator_peak(lambda: _trainer(tmp_path, real, fields=fields).train())
    assert found.peak_allocated_bytes == pytest.approx(truth, rel=0.01)


def test_a_batch_of_one_row_is_never_padded(tmp_path):
    batch = largest_batch(_trainer(tmp_path, [64, 63], fields={"per_device_train_batch_size": 1}))
    assert bool(batch["attention_mask"].all())


def test_rows_of_text_that_differ_in_characters_alone(tmp_path):
    """The size of text is in characters: the shortest of them all shows whether batches have padding."""
    from datasets import Dataset

    def split(rows):
        return _collate([{"input_ids": row["text"].split()} for row in rows])

    trainer = _trainer(tmp_path, [8])
    trainer.data_collator = split
    for texts, padded in ((["aaaa " * 8] * 6 + ["aaa " * 8] * 6 + ["a a"], True), (["aa " * 8, "a " * 8] * 6, False)):
        trainer.train_dataset = Dataset.from_dict({"text": texts})
        mask = largest_batch(trainer)["attention_mask"]
        assert mask.shape == (4, 8) and bool(mask.all()) is not padded
