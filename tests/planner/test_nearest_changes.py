"""What is proposed where nothing fits: which proposals are estimated, and which their sketch suffices for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.spec_job import read_model
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.nothing_fits import nearest
from hf_memopt.planner.nothing_fits.nearest import (
    Combination,
    _estimates,
    _falls_short,
    _needs,
    _proposal,
    _smaller,
    _weights,
)
from hf_memopt.planner.settle import settle
from hf_memopt.units import GIB

ZERO3 = Choice("zero3", 1, 16, 1.0, "adamw_torch_fused", "bfloat16")
SKETCH = SimpleNamespace(device_bytes=lambda choice, length: (12 * GIB, GIB), outside_layers=GIB)


def combination(choice: Choice, sketched: int) -> Combination:
    request = SimpleNamespace(memory_budget=20 * GIB)
    return Combination({"devices": 3}, ["8 × cards, strategy zero3"], request, choice, sketched)


def test_zero3_gathers_what_is_outside_the_layers():
    assert _needs(SKETCH, ZERO3, 1) == 14 * GIB
    assert _needs(SKETCH, replace(ZERO3, strategy="fsdp2"), 1) == 12 * GIB


def test_a_sketch_says_about():
    certain = combination(ZERO3, 16 * GIB)
    assert _estimates([certain]) == [None]
    assert _proposal(certain, None).text == "8 × cards, strategy zero3: about 16.00 GiB"


def test_other_models_are_proposed_after_the_family():
    """The only smaller gpt-oss fits no card of 12 GB, either."""
    proposed = _smaller(JobSpec(model="gpt-oss-120b", config=load_config("gpt-oss-120b")))
    assert proposed[0] == "gpt-oss-20b" and "phi-3-mini" in proposed
    sizes = [_weights(load_config(name)) for name in proposed[1:]]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.slow
def test_smaller_models_are_tried_with_single_samples(monkeypatch):
    """Where the weights alone are too large, the choice that needs the least may have any micro-batch."""
    tried = []
    monkeypatch.setattr(nearest, "_estimates", lambda mixes: tried.extend(mixes) or [None] * len(mixes))
    monkeypatch.setattr(nearest, "_proposal", lambda *_: None)
    spec = settle(read_model(JobSpec(model="gpt-oss-120b", hardware="rtx_3060", method="lora")), "lora")
    nearest._smaller_models(spec, Choice("none", 16, 2, 1.0, "adamw_torch_fused", "bfloat16"))
    assert len(tried) == 4 and {(mix.choice.micro_batch, mix.choice.accumulation) for mix in tried} == {(1, 32)}


def test_shorter_samples_of_what_failed_by_far_are_not_tried():
    """Its sketch said 10 GiB and its estimate 60: shorter samples, sketched with 8, need 48 of 20."""
    failed = combination(ZERO3, 10 * GIB)
    shorter = replace(failed, levels=failed.levels | {"length": 1}, sketched=8 * GIB)
    by_far, by_little = (SimpleNamespace(device_bytes=size * GIB, paged_bytes=0) for size in (60, 22))
    assert _falls_short(shorter, failed, by_far) and not _falls_short(shorter, failed, by_little)
    assert not _falls_short(replace(shorter, choice=replace(ZERO3, strategy="fsdp2")), failed, by_far)
    assert not _falls_short(replace(shorter, levels={"devices": 2, "length": 1}), failed, by_far)
    assert not _falls_short(failed, failed, by_far)


def test_more_devices_of_which_each_holds_as_much_are_not_tried():
    """A host's 397B experts on 2, 4 and 8 cards were three estimates of a minute each, all of 30.16 GiB."""
    failed = combination(ZERO3, 10 * GIB)
    estimate = SimpleNamespace(device_bytes=22 * GIB, paged_bytes=0)
    more = replace(failed, levels={"devices": 4})
    assert _falls_short(more, failed, estimate)
    assert not _falls_short(replace(more, sketched=10 * GIB - 1), failed, estimate)
    assert not _falls_short(replace(more, levels=more.levels | {"length": 1}), failed, estimate)


@pytest.mark.slow
def test_a_few_tries_come_to_a_much_smaller_model():
    """Of models that a card's memory holds by their weights alone, several of nearly one size come first."""
    spec = settle(JobSpec(model="qwen3.5-397b-a17b", hardware="rtx_4090", method="qlora", seq_len=2048), "qlora")
    models = [(name, nearest._of_model(spec, name)) for name in nearest._smaller(spec)]
    held = [(name, changed) for name, changed in models if not nearest.excessive_weights(changed)]
    tried = [nearest._weights(changed.config) for _, changed in nearest._apart(held)[: nearest._MODELS]]
    assert tried[-1] < tried[0] / 2
    assert nearest._weights(held[nearest._MODELS - 1][1].config) > 0.7 * tried[0]


@pytest.mark.slow
def test_a_model_of_embeddings_replaces_no_other():
    def smaller(name):
        return _smaller(JobSpec(model=name, config=load_config(name)))

    assert smaller("qwen3-4b")[:2] == ["qwen3-1.7b", "qwen3-0.6b"]
    assert smaller("qwen3-embedding-4b") == ["qwen3-embedding-0.6b"]
    assert "whisper-tiny" not in smaller("llama-3.1-8b") and smaller("whisper-large-v3")[0].startswith("whisper-")
