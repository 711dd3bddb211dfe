"""estimate: where no single change suffices, the smallest combination that does; and no advice that saves nothing."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from hf_memopt.engines import engine_named
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
