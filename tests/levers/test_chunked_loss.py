"""A loss in chunks is the loss: value, every gradient, whole runs; it takes less memory, and the estimator sees it."""

import copy

import pytest
import torch
from conftest import slow
from faults import Strikes
from small_runs import collate, llama, train, with_lora
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    default_data_collator,
)
from video_models import FAMILIES

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, estimate
from hf_memopt.levers.chunked_loss import LazyLogits, chunk_loss
from hf_memopt.levers.language_model import uses_loss_function

SMALL = {
    "vocab_size": 200,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
MODELS = {
    "plain": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "soft cap": ("gemma2", {"head_dim": 8, "final_logit_softcapping": 3.0, "attn_implementation": "eager"}),
    "divided": ("granite", {"logits_scaling": 4.0}),
    "multiplied": ("cohere", {"logit_scale": 0.5}),
    "bias": ("phi", {}),
    **{name: (name, {}) for name in FAMILIES},  # of texts beside pictures
}


def pair(name: str, size: int = 7):
    """A model, and its copy with a loss in chunks."""
    family, more = MODELS[name]
    torch.manual_seed(0)
    if family in FAMILIES:
        plain = AutoModelForImageTextToText.from_config(FAMILIES[family]()[0]).train()
    else:
        plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SMALL, **more)).train()
    assert uses_loss_function(plain) and uses_loss_function(type(plain))
    chunked = copy.deepcopy(plain)
    chunk_loss(chunked, size)
    return plain, chunked


def batch():
    torch.manual_seed(1)
    ids = torch.randint(20, 200, (3, 20))  # no special tokens
    labels = ids.clone()
    labels[0, :9] = -100
    labels[2, 3:] = -100
    return {"input_ids": ids, "labels": labels}


def results(model, **more):
    model.zero_grad()
    loss = model(**batch(), **more).loss
    loss.backward()
    return loss.detach(), {
        name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None
    }


@pytest.mark.drawn(5)
@pytest.mark.parametrize("items", [None, torch.tensor(40)])
@pytest.mark.parametrize("name", list(MODELS))
def test_loss_and_gradients_are_the_reference(name, items):
    """In float64, in which the order of a CPU's sums plays no part: only the loss, which transformers takes in fp32,
    and its scale round to fp32 (6e-8 each), which reaches every gradient as a common factor. In fp32 a gradient whose
    terms cancel, as those of a key's bias do, is off by any multiple of that.
    """
    plain, chunked = (model.double() for model in pair(name))
    more = {} if items is None else {"num_items_in_batch": items}
    (loss, wanted), (found_loss, found) = results(plain, **more), results(chunked, **more)
    assert torch.allclose(found_loss, loss, rtol=1e-6)
    assert wanted.keys() == found.keys()
    for weight, gradient in wanted.items():
        assert (found[weight] - gradient).norm() <= 1e-6 * gradient.norm(), weight


def test_a_frozen_head_gets_no_gradient():
    plain, chunked = pair("plain")
    for model in (plain, chunked):
        model.lm_head.requires_grad_(False)
    (_, wanted), (_, found) = results(plain), results(chunked)
    assert "lm_head.weight" not in found and wanted.keys() == found.keys()


def test_under_autocast_it_is_as_near_as_16_bits_are():
    plain, chunked = pair("plain")
    with torch.autocast("cpu", torch.bfloat16):
        (loss, wanted), (found_loss, found) = results(plain), results(chunked)
    assert torch.allclose(found_loss, loss, rtol=1e-4)
    for weight, gradient in wanted.items():
        cosine = torch.nn.functional.cosine_similarity(found[weight].flatten(), gradient.flatten(), dim=0)
        assert cosine > 0.999, weight


def test_logits_are_there_for_whoever_asks():
    plain, chunked = pair("soft cap")
    out = chunked(**batch())
    wanted = plain(**batch()).logits
    assert out.logits.shape == wanted.shape
    assert torch.allclose(torch.softmax(out.logits, -1), torch.softmax(wanted, -1), atol=1e-6)
    assert torch.allclose(out.logits.argmax(-1).float(), wanted.argmax(-1).float())
    assert torch.allclose(out.logits[:, -1], wanted[:, -1], atol=1e-6)
    chunked.eval()
    with torch.no_grad():
        assert isinstance(chunked(**batch()).logits, torch.Tensor)


def test_a_batch_without_labels_is_no_number_as_ever():
    plain, chunked = pair("plain")
    silent = {**batch(), "labels": torch.full((3, 20), -100)}
    for model in (plain, chunked):
        loss = model(**silent).loss
        assert loss.isnan()
        torch.where(loss.isnan(), 0.0, loss).backward()  # as Ulysses leaves a device's part out (transformers 5.24)
        assert all((weight.grad == 0).all() for weight in model.parameters())
    items = torch.tensor(5)
    assert plain(**silent, num_items_in_batch=items).loss == chunked(**silent, num_items_in_batch=items).loss == 0


IN_CHUNKS = {"loss_chunk_size": 16}
RUNS = {
    "plain": (llama, {}),
    "accumulation": (llama, {"gradient_accumulation_steps": 4}),
    "LoRA": (with_lora, {}),
    "checkpointed": (llama, CHECKPOINTED),
    "smoothed": (llama, {"label_smoothing_factor": 0.1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(RUNS))
def test_whole_runs_are_the_same(name, tmp_path):
    """In float64 up to the loss, which transformers takes in fp32.

    By SGD, which moves weights by their gradients: Adam makes whole steps of gradients that are rounding errors.
    """
    model, fields = RUNS[name]
    fields = {**fields, "optim": "sgd", "learning_rate": 0.1}
    wanted = train(tmp_path / "plain", kind=Trainer, model=model, **fields)
    found = train(tmp_path / "chunked", model=model, memory=IN_CHUNKS, **fields)
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_with_out_of_memory_too(tmp_path):
    wanted = train(tmp_path / "plain", kind=Trainer)
    found = train(tmp_path / "chunked", Strikes({"forward": {100}, "backward": {150}}), memory=IN_CHUNKS)
    assert len(found.events) == 2
    assert torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-6)


def test_the_loss_takes_a_sixteenth():
    """Peak of head and loss at 1024 tokens × 16,000 entries, beyond what goes in and comes out: a frozen head's."""

    def peak(size):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **{**SMALL, "vocab_size": 16_000}))
        model.requires_grad_(False)
        if size:
            chunk_loss(model, size)
        model.train()
        hidden = torch.randn(1, 1024, 32, requires_grad=True)
        labels = torch.randint(0, 16_000, (1, 1024))
        return allocator_peak(lambda: model.loss_function(model.lm_head(hidden), labels, 16_000).backward())

    assert peak(32) <= peak(None) / 16


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, slow(True)])
def test_the_estimator_sees_it(lora, tmp_path):
    from peft import LoraConfig

    from hf_memopt.levers.adapters import add_adapters

    config = AutoConfig.for_model("llama", **{**SMALL, "vocab_size": 8000, "num_hidden_layers": 3})
    adapter = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM") if lora else None
    memory_args, fields = MemoryArguments(loss_chunk_size=64), {"per_device_train_batch_size": 2}
    row = {"input_ids": [7] * 256, "labels": [7] * 256}

    def run():
        model = AutoModelForCausalLM.from_config(config)
        model = add_adapters(model, adapter) if lora else model
        args = TrainingArguments(
            str(tmp_path),
            use_cpu=True,
            max_steps=2,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            **fields,
        )
        MemoryTrainer(
            model=model,
            args=args,
            train_dataset=[row] * 8,
            data_collator=default_data_collator,
            memory_args=memory_args,
        ).train()

    found = estimate(config, fields, 256, "cpu", adapter, memory_args=memory_args)
    assert found.peak_allocated_bytes == pytest.approx(allocator_peak(run), rel=0.03)
    assert found.peak_allocated_bytes < 0.75 * estimate(config, fields, 256, "cpu", adapter).peak_allocated_bytes


def test_refused_with_a_reason(tmp_path):
    t5 = AutoConfig.for_model("t5", vocab_size=64, d_model=16, d_ff=32, d_kv=4, num_layers=1, num_heads=4)
    with pytest.raises(InputError, match="T5ForConditionalGeneration computes its loss itself"):
        chunk_loss(AutoModelForSeq2SeqLM.from_config(t5), 64)
    classifier = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", **SMALL))
    with pytest.raises(InputError, match="no head over a vocabulary"):
        chunk_loss(classifier, 64)
    masked = AutoConfig.for_model("modernbert", **SMALL)  # whose loss_function is of each token itself
    with pytest.raises(
        InputError, match="ModernBertForMaskedLM computes its loss itself, or not that of the next token"
    ):
        chunk_loss(AutoModelForMaskedLM.from_config(masked), 64)
    with pytest.raises(InputError, match="loss_chunk_size=0 must be above 0"):
        MemoryArguments(loss_chunk_size=0)
    args = TrainingArguments(str(tmp_path), use_cpu=True, use_liger_kernel=True, report_to="none")
    with pytest.raises(InputError, match="use one of them"):
        MemoryTrainer(model=llama(), args=args, data_collator=collate, memory_args=MemoryArguments(loss_chunk_size=64))


def test_logits_stay_unmade_through_what_is_recorded_alone():
    head = torch.nn.Linear(4, 5)
    head.forward = lambda hidden, compute: compute(hidden, head.weight, head.bias)
    lazy = LazyLogits(torch.ones(1, 3, 4), head)
    scaled = torch.tanh(lazy / 2) * 30
    assert type(scaled) is LazyLogits and len(scaled.steps) == 3
    assert torch.equal(scaled.materialize(), torch.tanh(lazy.materialize() / 2) * 30)
    assert type(torch.softmax(lazy, dim=-1)) is torch.Tensor
