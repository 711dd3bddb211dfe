"""Several rows to a sample: none is lost, none sees another, and the estimator counts the masks that part them."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from small_runs import TINY
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
from trl import SFTConfig, SFTTrainer

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, estimate, estimate_trainer
from hf_memopt.data.sample_batches import pack_best_fit
from hf_memopt.recipe.packing import _depends_on_the_sample_before, keep_samples_apart


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=60))
def test_every_sample_is_in_one_pack(sizes):
    packs = pack_best_fit(sizes, 50)
    assert sorted(index for pack in packs for index in pack) == list(range(len(sizes)))
    filled = [sum(sizes[index] for index in pack) for pack in packs]
    assert max(filled) <= 50
    # Two packs that are less than half full would have been one.
    assert sum(tokens <= 25 for tokens in filled) <= 1


@pytest.mark.slow
def test_the_estimator_counts_the_masks(tmp_path):
    length = 48
    rows = [
        {
            "input_ids": torch.full((length,), 5),
            "labels": torch.full((length,), 5),
            "position_ids": torch.tensor([*range(20), *range(20), *range(8)]),
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


WIDER = {**TINY, "hidden_size": 32, "head_dim": 8}


def tiny_gpt_oss():
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return GptOssForCausalLM(GptOssConfig(**WIDER, **experts))


def tiny_gemma3():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=WIDER, vision_config=vision, image_token_index=60)
    return Gemma3ForConditionalGeneration(config)


def tiny_qwen3_next():
    config = Qwen3NextConfig(
        **WIDER | {"num_hidden_layers": 4},
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return Qwen3NextForCausalLM(config)


def packing_trainer(model, tokenizer, tmp_path, rows=2, **fields):
    torch.manual_seed(0)
    fields = {"packing": True, "max_length": 16, "activation_checkpointing": False, **QUIET, **fields}
    args = SFTConfig(str(tmp_path), per_device_train_batch_size=rows, bf16=False, **fields)
    data = Dataset.from_dict({"input_ids": [[3, 4, 5]] * 4})
    return SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)


@pytest.fixture
def tokenizer(builtin_model):
    return AutoTokenizer.from_pretrained(builtin_model)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("make", [partial(llama, torch.float32), tiny_gemma3])
def test_samples_of_a_row_are_apart(make, rows, tokenizer, tmp_path):
    trainer = packing_trainer(make(), tokenizer, tmp_path, rows)
    assert trainer.padding_free
    keep_samples_apart(trainer)
    assert trainer.model.training and not _depends_on_the_sample_before(trainer)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (tiny_gpt_oss, "gpt_oss would carry one sample"),  # transformers 5.23 makes its masks without the positions
        (tiny_qwen3_next, "qwen3_next would carry one sample"),
        (lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2)), "bloom takes no"),
    ],
)
def test_models_that_mix_the_samples_of_a_row_are_refused(make, reason, tokenizer, tmp_path):
    with pytest.raises(InputError, match=f"packing: {reason}"):
        keep_samples_apart(packing_trainer(make(), tokenizer, tmp_path))


def test_rows_whose_samples_see_each_other_are_refused(tokenizer, tmp_path):
    trainer = packing_trainer(llama(torch.float32), tokenizer, tmp_path, packing_strategy="wrapped")
    assert not trainer.padding_free
    with pytest.raises(InputError, match="packing_strategy=wrapped lets the samples of a row see each other: use bfd"):
        keep_samples_apart(trainer)
