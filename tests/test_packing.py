"""Several rows to a sample: none is lost, none sees another, and the estimator counts the masks that part them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from test_memory_trainer import QUIET, llama
from transformers import (
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_memopt import InputError, estimate, estimate_trainer, get_preset
from hf_memopt.data.tokens import IGNORED, answered, pack_best_fit, packed_answers, position_ids
from hf_memopt.estimator.accounting.profiled_peak import allocator_peak
from hf_memopt.recipe import packing
from hf_memopt.recipe.arguments import RecipeArguments
from hf_memopt.recipe.job import Job
from hf_memopt.recipe.packing import _depends_on_the_sample_before, keep_samples_apart


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


def tiny_gpt_oss():
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    return GptOssForCausalLM(config)


def tiny_gemma3():
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, image_token_index=60)
    return Gemma3ForConditionalGeneration(config)


def tiny_qwen3_next():
    config = Qwen3NextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=8,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        pad_token_id=0,
    )
    return Qwen3NextForCausalLM(config)


def packing_trainer(model, tmp_path, rows=2):
    torch.manual_seed(0)
    args = TrainingArguments(tmp_path, **QUIET, per_device_train_batch_size=rows)
    return Trainer(model, args, train_dataset=Dataset.from_dict({"input_ids": [[3, 4]]}))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [partial(llama, torch.float32), tiny_gemma3])
def test_samples_of_a_row_are_apart(make, rows, tmp_path):
    """Beside a KV cache they are not, which the Trainer turns off in the outer configuration of a model alone."""
    trainer = packing_trainer(make(), tmp_path, rows)
    if make is not tiny_gemma3:
        trainer.model.config.use_cache = True
        assert _depends_on_the_sample_before(trainer.model, rows)
    keep_samples_apart(trainer)
    assert trainer.model.training and not _depends_on_the_sample_before(trainer.model, rows)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_gpt_oss, "gpt_oss would carry one sample"),  # transformers 5.23 makes its masks without the positions
        (tiny_qwen3_next, "qwen3_next would carry one sample"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)), "bloom takes no"),
    ],
)
def test_models_that_mix_the_samples_of_a_row_are_refused(make, reason, tmp_path):
    with pytest.raises(InputError, match=f"packing: {reason}"):
        keep_samples_apart(packing_trainer(make(), tmp_path))


def test_flash_attention_packs_single_rows_only(monkeypatch, caplog):
    """flash-attn needs a card; its name stands for it."""
    monkeypatch.setattr(packing, "resolve_attention", lambda hardware, asked: asked or "flash_attention_2")

    def job(rows, asked=None):
        args = SimpleNamespace(per_device_train_batch_size=rows, per_device_eval_batch_size=1)
        return Job(RecipeArguments(packing=True, attn_implementation=asked), get_preset("cpu"), args, None, None, {})

    with pytest.raises(InputError, match="micro-batches of one row only"):
        packing.choose_attention(job(2, "flash_attention_2"))
    several, single = job(2), job(1)
    packing.choose_attention(several)
    packing.choose_attention(single)
    assert several.recipe.attn_implementation == "sdpa"
    assert "flash_attention_2 keeps packed samples apart" in caplog.text
    assert single.recipe.attn_implementation is None
