"""Block-sparse attention against the same model with a dense mask of its own: outputs, gradients, padding, packing."""

import json

import pytest
import torch
from conftest import refused, slow
from peft import LoraConfig
from small_runs import TINY
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)
from transformers import default_data_collator as collate
from video_models import FAMILIES

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, estimate
from hf_memopt.engines import engine_named
from hf_memopt.levers import attention_pattern
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.attention_pattern import attend_to_blocks
from hf_memopt.levers.sliding_window import set_window

BLOCK, LOCAL, FIRST, TOKENS = 4, 1, 1, 23


def llama(**more) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**TINY | {"hidden_size": 32}, use_cache=False, **more))


def sparse(**more) -> LlamaForCausalLM:
    model = llama(**more)
    attend_to_blocks(model, BLOCK, LOCAL, FIRST)
    return model


def ids(rows: int = 2, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randint(3, 64, (rows, tokens), generator=torch.Generator().manual_seed(1))


def dense_mask(tokens: int = TOKENS) -> torch.Tensor:
    """(tokens, tokens), written out: which token attends to which."""
    mask = torch.zeros(tokens, tokens, dtype=torch.bool)
    for query in range(tokens):
        for key in range(query + 1):
            mask[query, key] = query // BLOCK - key // BLOCK <= LOCAL or key // BLOCK < FIRST
    return mask


def outcome(model, **batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and the gradient of all trained weights."""
    model.zero_grad()
    out = model(**batch)
    out.loss.backward()
    trained = [weight.grad.flatten() for weight in model.parameters() if weight.requires_grad]
    return out.logits.detach(), torch.cat(trained)


def same(found, wanted) -> bool:
    return all(torch.allclose(one, other, atol=1e-6) for one, other in zip(found, wanted, strict=True))


def test_logits_and_gradients_are_those_of_a_dense_mask():
    batch = {"input_ids": ids(), "labels": ids()}
    wanted = outcome(llama(), attention_mask=dense_mask().expand(2, 1, -1, -1), **batch)
    assert same(outcome(sparse(), **batch), wanted)
    assert not same(outcome(llama(), **batch), wanted), "the pattern masks something here"


def test_padding_is_respected():
    """A row whose padding is so long that its last queries attend to nothing."""
    batch = {"input_ids": ids(), "labels": ids()}
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    kept[1, 6:] = False
    batch["labels"][1, 6:] = -100
    both = (dense_mask() & kept[:, None, :])[:, None]
    wanted, found = (
        outcome(llama(), attention_mask=both, **batch),
        outcome(sparse(), attention_mask=kept.long(), **batch),
    )
    assert torch.allclose(found[0][kept], wanted[0][kept], atol=1e-6)
    assert torch.allclose(found[1], wanted[1], atol=1e-6) and torch.isfinite(found[1]).all()


def test_packed_sequences_are_as_if_alone():
    """None of them begins where a block does."""
    lengths, model = (9, 14), sparse()
    packed = {"input_ids": ids(1), "position_ids": torch.cat([torch.arange(length) for length in lengths])[None]}
    found = model(**packed).logits[0].split(lengths)
    alone = [model(input_ids=row[None]).logits[0] for row in ids(1)[0].split(lengths)]
    assert same(found, alone)


def test_padding_before_a_sequence_does_not_count():
    """As batches are padded for generation: neither blocks nor the first ones are of padding."""
    model, row = sparse(), ids(1)
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), row], dim=1)
    mask, positions = (padded > 0).long(), torch.cat([torch.zeros(6, dtype=torch.long), torch.arange(TOKENS)])[None]
    found = model(input_ids=padded, attention_mask=mask, position_ids=positions).logits[:, 6:]
    assert torch.allclose(found, model(input_ids=row).logits, atol=1e-6)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_as_without_a_cache(cache):
    model, limits = sparse().eval(), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    plain = model.generate(ids(1), use_cache=False, **limits)
    assert torch.equal(model.generate(ids(1), use_cache=True, cache_implementation=cache, **limits), plain)


def test_a_window_in_the_place_of_saved_blocks():
    """A model that was trained with blocks keeps them in its configuration."""
    model = sparse()
    set_window(model, 5)
    only = llama()
    set_window(only, 5)
    assert torch.equal(model(input_ids=ids()).logits, only(input_ids=ids()).logits)


def test_short_sequences_need_no_mask():
    made = attention_pattern._mask(
        batch_size=1,
        q_length=12,
        kv_length=12,
        config=sparse().config,
        mask_function=lambda batch, head, query, key: key <= query,
    )
    assert made is None, "12 tokens lie within 1 + 1 + 1 blocks of 4"


def test_adapters_checkpointing_and_generation():
    model = add_adapters(llama(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    attend_to_blocks(model, BLOCK, LOCAL, FIRST)
    plain = outcome(model, input_ids=ids(), labels=ids())
    model.base_model.model.activation_checkpointing_enable({"use_reentrant": False})
    assert same(outcome(model.train(), input_ids=ids(), labels=ids()), plain)
    base = sparse().eval()
    whole = base(input_ids=ids(1)).logits[:, -1]
    before = base(input_ids=ids(1)[:, :-1], use_cache=True)
    step = base(input_ids=ids(1)[:, -1:], past_key_values=before.past_key_values, use_cache=True)
    assert torch.allclose(step.logits[:, -1], whole, atol=1e-6), "a cache sees what the whole text sees"


def test_a_layer_with_its_own_window_keeps_it():
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        sliding_window=3,
        layer_types=["sliding_attention"],
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    attend_to_blocks(model, 2, 0, 0)
    before = model(input_ids=ids(1)).logits[0, 21]
    seen = []
    for place in range(TOKENS):
        changed = ids(1)
        changed[0, place] = 1
        if not torch.equal(model(input_ids=changed).logits[0, 21], before):
            seen.append(place)
    assert seen == [20, 21], "in its block, and among the last three"


def test_only_the_text_of_a_video_model_has_the_pattern():
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(FAMILIES["smolvlm"]()[0]).eval()
    attend_to_blocks(model, BLOCK, 0, FIRST)
    words = torch.arange(40, 58)[None]
    before = model(input_ids=words).logits[0, -1]
    changed = [words.clone().index_fill_(1, torch.tensor([place]), 70) for place in range(18)]
    seen = [place for place in range(18) if not torch.equal(model(input_ids=changed[place]).logits[0, -1], before)]
    assert seen == [0, 1, 2, 3, 16, 17]
    assert model.config.vision_config._attn_implementation == "sdpa"


def test_the_saved_model_says_so_and_loads_without_this_package(tmp_path):
    sparse().save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["sparse_block_size"], saved["num_local_blocks"], saved["num_global_blocks"]) == (BLOCK, LOCAL, FIRST)
    assert attention_pattern.IMPLEMENTATION not in json.dumps(saved)
    assert LlamaForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("family", "more", "reason"),
    [
        ("bloom", {}, "bloom does not attend through transformers' attention interface"),
        ("t5", {}, "t5 does not attend through"),
        ("gemma2", {}, "gemma2 does not attend through"),
        ("bert", {}, "bert also attends to later tokens"),
        ("llama", {"attention_dropout": 0.1}, "flex attention has no dropout"),
    ],
)
def test_models_that_cannot(family, more, reason):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, vocab_size=64, **{**sizes, **more})
    from transformers import AutoModel

    with torch.device("meta"), pytest.raises(InputError, match=reason):
        attend_to_blocks(AutoModel.from_config(config), BLOCK, LOCAL, FIRST)


def test_a_mask_of_the_users_own_is_refused():
    with pytest.raises(InputError, match="attention_mask of its own"):
        sparse()(input_ids=ids(), attention_mask=dense_mask().expand(2, 1, -1, -1))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"sparse_block_size": 64, "sliding_window": 256}, "use one of them"),
        ({"num_local_blocks": 2}, "set it too"),
        ({"num_global_blocks": 0}, "set it too"),
    ],
)
def test_settings_that_exclude_each_other(given, reason):
    assert reason in next(refused(MemoryArguments(**given), {}, engine_named("none")))


@pytest.fixture
def on_flex(monkeypatch):
    """The CPU in CUDA's place, through flex attention uncompiled: forward only, since it has no backward on CPUs."""
    from transformers.integrations import flex_attention

    monkeypatch.setattr(attention_pattern, "uses_flex", lambda device: True)
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)


def uncompiled(query, key, value, training=False, **kwargs):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query, key, value, **kwargs)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_gives_the_same(on_flex):
    kept = torch.ones(2, TOKENS, dtype=torch.bool)
    kept[1, 20:] = False
    with torch.no_grad():
        wanted = llama()(input_ids=ids(), attention_mask=(dense_mask() & kept[:, None, :])[:, None]).logits
        found = sparse()(input_ids=ids(), attention_mask=kept.long()).logits
    assert torch.allclose(found[kept], wanted[kept], atol=1e-6)


@pytest.mark.parametrize("memory", [{"sparse_block_size": 32}, {"sliding_window": 40}])
def test_shared_sequences_are_refused(memory, tmp_path):
    """DeepSpeed's Ulysses puts itself in the place of sdpa and flash attention, not of a pattern's."""
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    from hf_memopt.trainer.data_loading import sequence_parallel_collator

    trainer = MemoryTrainer(model=llama(), args=args, memory_args=MemoryArguments(**memory))
    with pytest.raises(InputError, match=f"{next(iter(memory))} needs whole sequences"):
        sequence_parallel_collator(trainer)


SPARSE = {"sparse_block_size": 32, "num_local_blocks": 1}
LONG = 256


def trained(memory: dict, layout: str, folder) -> int:
    """The peak of two steps of a Llama that is deep enough to be extended from shallow ones."""
    more = {
        "plain": {},
        "packed": {"position_ids": torch.cat([torch.arange(100), torch.arange(LONG - 100)])},
        "padded": {"attention_mask": torch.ones(LONG, dtype=torch.long).index_fill_(0, torch.arange(200, LONG), 0)},
    }[layout]
    rows = [{"input_ids": row, "labels": row, **more} for row in torch.randint(3, 64, (8, LONG))]
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        max_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
    )
    given = {"args": args, "train_dataset": rows, "data_collator": collate, "memory_args": MemoryArguments(**memory)}
    return allocator_peak(lambda: MemoryTrainer(model=LlamaForCausalLM(deep()), **given).train())


def deep() -> LlamaConfig:
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8}
    return LlamaConfig(**TINY | sizes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("memory", "layout"),
    [
        (SPARSE, "packed"),
        slow(SPARSE, "plain"),
        slow(SPARSE, "padded"),
        slow({"sliding_window": 40}, "packed"),
        slow({"sliding_window": 40}, "plain"),
    ],
)
def test_the_estimator_is_within_a_hundredth(memory, layout, tmp_path):
    measured = trained(memory, layout, tmp_path)
    predicted = estimate(
        deep(),
        {"per_device_train_batch_size": 4},
        LONG,
        "cpu",
        memory_args=MemoryArguments(**memory),
        padded=layout == "padded",
        packed=layout == "packed",
    ).peak_allocated_bytes
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [SPARSE, slow({"sliding_window": 40})])
def test_an_estimate_for_cuda_counts_flex_attention(memory):
    """A block mask, and nothing of tokens × tokens; by source, not measured on a GPU."""

    def peak(memory: dict, hardware: str) -> int:
        # bf16, since sdpa, which it is compared with, has no fused kernel for grouped heads in fp32.
        found = estimate(
            deep(),
            {"per_device_train_batch_size": 4, "bf16": hardware != "cpu"},
            2048,
            hardware,
            memory_args=MemoryArguments(**memory),
        )
        notes.extend(found.notes)
        return found.peak_allocated_bytes

    notes: list[str] = []
    more = peak(memory, "rtx_4090") - peak({}, "rtx_4090")
    blocks = (2048 // 128) * (2048 // 128 + 1)
    assert more == pytest.approx(4 * 4 * 4 * blocks, abs=8 * 512), (
        "four tables of int32 and their lengths, for each of four samples"
    )
    assert any("not measured on a GPU" in note for note in notes)
    assert peak(memory, "cpu") - peak({}, "cpu") > 4 * 2048 * 2048
    assert any("sdpa with a mask of tokens × tokens" in note for note in notes)
