"""estimate: where no single change suffices, the smallest combination that does; and no advice that saves nothing."""

from dataclasses import replace
from types import SimpleNamespace

import frozen
import pytest
from transformers import LlamaConfig

from hf_memopt.engines import engine_named
from hf_memopt.errors import InputError
from hf_memopt.estimator import job_checks, suggestions
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.job import describe
from hf_memopt.estimator.suggestions import _LEAST_SAVING, _changed, largest_savings, smallest_combination
from hf_memopt.hardware.catalog import catalog_entry
from hf_memopt.levers.changes import CHECKPOINTING, LORA, QLORA, ZERO3_OFFLOAD


def _job(**fields):
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=4, num_attention_heads=8, vocab_size=8000
    )
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch_fused"}
    return describe(config, {**usual, "bf16": True, **fields}, 1024, "rtx_3060", dtype="float32")


@pytest.mark.slow
def test_the_smallest_combination_is_found_where_no_single_change_fits():
    job = _job()
    estimate = estimate_job(job)
    savings = largest_savings(job, estimate, count=99)
    assert all(saving.saved_bytes >= _LEAST_SAVING * estimate.peak_allocated_bytes for saving in savings)
    memory = int((estimate.device_bytes - savings[0].saved_bytes) * 0.98)
    job = replace(job, device=replace(job.device, memory=memory))
    estimate = estimate_job(job)
    assert not estimate.fits and not any(one.fits for one in largest_savings(job, estimate, count=99))
    combination = smallest_combination(job, estimate)
    assert combination.fits and estimate.device_bytes - combination.saved_bytes <= memory
    assert ", " in combination.change and "--method" not in combination.change, combination
    job = replace(job, device=replace(job.device, memory=2**20))
    assert smallest_combination(job, estimate) is None


def test_changes_of_a_combination_follow_each_other():
    job, texts = _changed(_job(), [CHECKPOINTING, LORA, QLORA])
    assert texts == ["activation_checkpointing=true", "--method qlora"]
    assert job.peft_config is not None and job.quantization_config.load_in_4bit and job.dtype == "bfloat16"
    assert _changed(_job(), [ZERO3_OFFLOAD])[1] == []  # one device has nothing to shard
    several = replace(_job(), world_size=8, engine=engine_named("ddp"), device=catalog_entry("a100_80gb"))
    job, texts = _changed(several, [ZERO3_OFFLOAD])
    assert texts == ["--strategy zero3_offload_cpu"] and job.engine.family == "deepspeed"
    assert job.fields["deepspeed"]["zero_optimization"]["stage"] == 3


def _sizes(job) -> float:
    """GiB as if each change saved so much, whatever the rest is."""
    saved = 40 * bool(job.fields.get("activation_checkpointing")) + 20 * (
        job.fields["per_device_train_batch_size"] == 1
    )
    saved += 0.5 * (job.memory_args is not None and job.memory_args.loss_chunk_size is not None)
    saved += 1 * ("8bit" in str(job.fields.get("optim"))) + 25 * (job.peft_config is not None)
    return 100 - saved - 3 * (job.seq_len < 1024)


def test_savings_and_combinations_by_what_each_change_saves(monkeypatch):
    """The least costly come first, and what is not needed is left out; a change that cannot be traced says nothing."""

    found, having = {}, SimpleNamespace(limit=100, untraced=False)

    def estimated(jobs, map_fn, speed):
        assert speed is False
        sizes = [_sizes(job) for job in jobs]
        return [
            InputError("no trace")
            if having.untraced and job.seq_len < 1024
            else SimpleNamespace(device_bytes=size, fits=size <= having.limit)
            for job, size in zip(jobs, sizes, strict=True)
        ]

    monkeypatch.setattr(suggestions, "estimate_jobs", estimated)
    monkeypatch.setattr(job_checks, "predicts_next_token", lambda task, config: True)  # which reads a model's source
    order = (*suggestions._ORDER[:3], LORA, QLORA)
    job, whole = _job(), SimpleNamespace(device_bytes=100, peak_allocated_bytes=100)
    for having.limit in (60, 39, 13.9, 10):
        fewest = smallest_combination(job, whole, order=order)
        found[f"within {having.limit}"] = fewest and [fewest.change, fewest.saved_bytes, fewest.fits]
    having.limit = 60
    for peak, having.untraced in ((100, False), (101, True)):
        savings = largest_savings(job, SimpleNamespace(device_bytes=100, peak_allocated_bytes=peak), count=9)
        found[f"savings {peak}"] = [[saving.change, saving.saved_bytes, saving.fits] for saving in savings]
    having.untraced = False
    found["first"] = [saving.change for saving in largest_savings(job, whole, count=1)]
    frozen.check("combinations", found)
    single = suggestions._single_sample
    for micro, tokens, accumulation, settings in (
        *((4, None, 2, (1, 8)), (1, None, 2, None), (4, 99, 2, None), (3, None, None, (1, 3))),
    ):
        training = {"gradient_accumulation_steps": accumulation} if accumulation else {}
        facts = SimpleNamespace(
            fields={"per_device_train_batch_size": micro},
            training=training,
            memory_args=SimpleNamespace(max_tokens_per_batch=tokens),
        )
        found = single(facts)
        assert (found and tuple(found.values())) == settings
