"""plan --quick: an answer by sketches."""

import json
import sys
from pathlib import Path

import pytest
from test_plan import config

from hf_memopt import InputError, plan
from hf_memopt.planner import search
from hf_memopt.planner.profiles import QUICK_NOTE

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "quick_plans.json"


@pytest.fixture(scope="module")
def job():
    return {"model": config(2), "hardware": "rtx_3060", "effective_batch_size": 8, "seq_len": 128, "method": "lora"}


@pytest.mark.slow
def test_nothing_is_estimated(job, monkeypatch):
    monkeypatch.setattr(search, "estimate_jobs", None)
    quick = plan(**job, quick=True)
    assert quick.to_dict()["quick"] is True and QUICK_NOTE in quick.notes
    for profile in quick:
        estimate = profile.estimate
        assert 0 < estimate.device_bytes <= profile.share * quick.spec.memory
        assert sum(estimate.breakdown.values()) <= estimate.peak_allocated_bytes < estimate.device_bytes
        assert estimate.peak_allocated_bytes == max(estimate.phases.values())


@pytest.mark.slow
def test_a_sketch_is_near_the_estimate_of_its_settings(job):
    from hf_memopt.estimator.api import estimate_jobs
    from hf_memopt.planner.choice_jobs import choice_job

    quick = plan(**job, quick=True)
    (estimate,) = estimate_jobs([choice_job(quick.spec, quick.usual.choice)])
    assert quick.usual.estimate.device_bytes == pytest.approx(estimate.device_bytes, rel=0.25)
    assert quick.usual.tokens_per_second == pytest.approx(estimate.tokens_per_second, rel=0.1)


@pytest.mark.slow
def test_where_nothing_fits_the_answer_says_how_much_is_missing(job, monkeypatch):
    monkeypatch.setattr(search, "estimate_jobs", None)
    quick = plan(**job, memory=2**28, quick=True)
    assert not quick.profiles and quick.missing_bytes > 0 and not quick.nearest


@pytest.mark.slow
def test_sharded_models_are_left_to_estimates(job):
    pytest.importorskip("deepspeed")
    with pytest.raises(InputError, match="strategy=zero3: only an estimate"):
        plan(**job | {"hardware": "rtx_3060x2"}, strategy="zero3", quick=True)


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [
        pytest.param("8", "YES, probably, with lora", marks=pytest.mark.slow),
        pytest.param("0.2", "NO, probably: ", marks=pytest.mark.slow),
    ],
)
def test_the_answer_says_that_it_is_a_sketch(memory, verdict, tmp_path, monkeypatch, capsys):
    from hf_memopt.cli.app import main

    config(2).save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    asked = ["hf-memopt", "plan", "config.json", "--hardware", "rtx_3060", "--method", "lora", "--memory", memory]
    monkeypatch.setattr(sys, "argv", [*asked, "--seq-len", "128", "--quick"])
    with pytest.raises(SystemExit):
        main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(verdict) and len(lines) <= 24 and max(map(len, lines)) <= 80
    following = next(number for number, line in enumerate(lines) if line.startswith("next   hf-memopt plan"))
    assert "--quick" not in "".join(lines[following:]) and "a sketch" in " ".join(lines)


def test_the_note_has_the_figures_of_the_benchmark():
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    memory = [row["memory_error"] for row in rows if "memory_error" in row]
    speed = [row["speed_error"] for row in rows if "speed_error" in row]
    assert len({row["question"] for row in rows}) >= 12
    assert f"{min(memory):+.0%} to {max(memory):+.0%}" in QUICK_NOTE
    assert f"{min(speed):+.0%} to {max(speed):+.0%}" in QUICK_NOTE
    assert f"of {len(memory)} settings" in QUICK_NOTE
