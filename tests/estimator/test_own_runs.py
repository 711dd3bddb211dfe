"""Runs of one's own scale the predicted speed of others of their kind, and of no others."""

import dataclasses
import json
import math
import os
import random
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from hf_memopt import estimate
from hf_memopt.errors import InputError
from hf_memopt.estimator.timing import own_runs
from hf_memopt.estimator.timing.own_runs import ERROR, OwnRuns, compared_speed, keep_run

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from record import RESULTS
from speed_published import taught_error

LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
ASKED = {
    "the same": ("--hardware", "rtx_4090"),
    "longer": ("--hardware", "rtx_4090", "--seq-len", 2048, "--set", "per_device_train_batch_size=2"),
    "another card": ("--hardware", "rtx_3090"),
    "two cards": ("--hardware", "rtx_4090x2"),
    "adapters": ("--hardware", "rtx_4090", "--method", "lora"),
    "compiled": ("--hardware", "rtx_4090", "--set", "torch_compile=true"),
    "offloaded": ("--hardware", "rtx_4090", "--set", "optimizer_cpu_offload=true", "--set", "optim=adamw_torch_fused"),
}


def write_llama(folder: Path) -> Path:
    """A configuration file of a small model."""
    LlamaConfig(**LLAMA, vocab_size=512).to_json_file(folder / "llama.json")
    return folder / "llama.json"


@pytest.fixture(scope="module")
def predicted():
    """An estimate with a speed."""
    return estimate(LlamaConfig(**LLAMA), {"bf16": True, "per_device_train_batch_size": 4}, 8, "rtx_4090")


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Writes the report of a run into the folder that counts."""
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(tmp_path / "runs"))

    def write(ratio, setup="dense models, full, 1 × NVIDIA GeForce RTX 4090", memory=0.0, name=None) -> Path:
        folder = tmp_path / "runs" / (name or f"run-{random.random()}")
        folder.mkdir(parents=True)
        report = {"speed": {"setup": setup, "ratio": ratio}, "relative_error": {"peak_allocated_bytes": memory}}
        (folder / "memory_report.json").write_text(json.dumps(report))
        own_runs._reports.cache_clear()
        return folder / "memory_report.json"

    return write


@pytest.fixture
def asked(command, tmp_path):
    """The JSON of an estimate of a small Llama, by what differs."""
    model = write_llama(tmp_path)

    def ask(name: str) -> dict:
        words = [] if "--seq-len" in ASKED[name] else ["--seq-len", 1024]
        code, out, errors = command("estimate", model, *ASKED[name], *words, "--json")
        assert code in (0, 1), errors
        return json.loads(out)

    return ask


def test_a_card_at_seven_tenths_of_the_catalogs_rates_is_predicted_so_after_two_runs(runs, asked):
    before = {name: asked(name) for name in ("the same", "longer")}
    runs(0.69)
    runs(0.73)
    for name, without in before.items():
        scaled = asked(name)
        for figure, factor in (("tokens_per_second", 0.71), ("step_seconds", 1 / 0.71), ("mfu", 0.71)):
            assert scaled[figure] == pytest.approx(factor * without[figure]), (name, figure)
        assert scaled["peak_reserved_bytes"] == without["peak_reserved_bytes"]
        assert (without["speed_error"], scaled["speed_error"]) == (0.2, ERROR)
        assert any("speed: 0.71 × what the card's rates say, from 2 of your runs (dense" in n for n in scaled["notes"])


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", list(ASKED)[2:])
def test_a_run_of_another_setup_says_nothing(name, runs, asked):
    runs(0.9, setup="nothing that is asked")
    without = asked(name)
    runs(0.5)
    scaled = asked(name)
    assert (scaled["tokens_per_second"], scaled["notes"]) == (without["tokens_per_second"], without["notes"])


@pytest.mark.slow
@pytest.mark.kept
def test_a_plan_shows_scaled_speeds_and_chooses_the_same(runs, command, tmp_path):
    words = ("plan", write_llama(tmp_path), "--hardware", "rtx_4090", "--seq-len", 512, "--quick")
    _, out, _ = command(*words, "--json")
    runs(0.5)
    code, scaled, _ = command(*words, "--json")
    assert code == 0
    without, scaled = json.loads(out), json.loads(scaled)
    for before, after in zip(without["profiles"], scaled["profiles"], strict=True):
        assert after["tokens_per_second"] == pytest.approx(0.5 * before["tokens_per_second"], rel=1e-3)
        assert after["training_arguments"] == before["training_arguments"]
    assert "from one of your runs" in command(*words)[1]


@pytest.mark.parametrize(
    ("name", "value", "counts"),
    [("RUNS", "off", False), ("RUNS", "OFF", False), ("CALIBRATION", "off", False), ("CALIBRATION", "", True)],
)
def test_one_switch_leaves_them_out(name, value, counts, runs, monkeypatch):
    runs(0.7, setup="a")
    monkeypatch.setenv(f"HF_MEMOPT_{name}", value)
    assert own_runs.own_runs("a") == (OwnRuns(0.7, 1, 0.0) if counts else None)


def test_of_many_runs_the_middle_counts_and_memory_that_was_off_is_said(runs):
    for ratio, memory in ((0.7, 0.001), (0.8, -0.024), (3.0, None), (0.75, 0.02)):
        runs(ratio, setup="a", memory=memory)
    found = own_runs.own_runs("a")
    assert (found.ratio, found.runs, found.memory_error) == (pytest.approx(0.775), 4, -0.024)
    assert found.in_words("a").endswith("scaled; memory: the peak of one was predicted 2.4% too low")
    for unsaid in (0.01, -0.01, None):
        assert "memory" not in dataclasses.replace(found, memory_error=unsaid).in_words("a")
    assert "1.1% too high" in dataclasses.replace(found, memory_error=0.011).in_words("a")


def test_the_interval_is_the_narrower_one_where_they_agree():
    for ratio, published, error in ((0.9, 0.15, 0.15), (0.7, 0.15, 0.2), (0.7, 0.75, 0.2), (1.0, None, 0.2)):
        assert OwnRuns(ratio, 2, None).error(published) == error
    rows = json.loads((RESULTS / "speed_published.json").read_text())["rows"]
    assert taught_error(rows) == ERROR


def test_reports_that_say_nothing_are_left_out(runs, caplog, tmp_path, monkeypatch):
    runs(0.8, setup="a")
    for damaged in ("x", math.nan, math.inf, 0, -1, None, 1e9, [1]):
        runs(damaged, setup="a")
    runs(0.8, setup="a").write_text('{"speed": {"ratio": 1.0}}')
    runs(0.8, setup="a").write_text('{"speed": [1.0], "relative_error": 3}')
    runs(0.8, setup="a").write_text('{"speed": {"ratio": 1, "setup": "a"}, "relative_error": 3}')
    assert own_runs.own_runs("a").runs == 1
    assert not caplog.messages
    runs(0.8, setup="a", name="broken").write_text("{")
    (tmp_path / "runs" / "gone-memory_report.json").symlink_to(tmp_path / "gone")
    own_runs._reports.cache_clear()
    assert own_runs.own_runs("a").runs == 1
    assert "broken" in caplog.text
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(tmp_path / "other"))
    assert own_runs.own_runs("a") is None
    assert "other is no folder" in caplog.text


def test_the_newest_reports_are_read(runs, monkeypatch):
    monkeypatch.setattr(own_runs, "_MOST", 2)
    for age, ratio in enumerate((0.5, 0.6, 0.9)):
        os.utime(runs(ratio, setup="a"), (1e9 - age, 1e9 - age))
    own_runs._reports.cache_clear()
    assert own_runs.own_runs("a").ratio == pytest.approx(0.55)


LATER = {"steps": 10, "tokens": 40_000, "seconds": 20.0, "split": False}  # where 4,000 tokens a step are predicted


@pytest.mark.parametrize(
    ("changed", "ratio"),
    [
        *(({}, 0.5), ({"steps": 5, "tokens": 20_000, "seconds": 10.0}, 0.5)),
        *(({"steps": 4, "tokens": 16_000, "seconds": 8.0}, None), ({"tokens": 20_000}, 0.25)),
        *(({"tokens": 19_999}, None), ({"split": True}, None)),
    ],
)
def test_what_a_runs_speed_says(changed, ratio, predicted):
    for scaled in (None, OwnRuns(0.8, 1, None)):
        factor = scaled.ratio if scaled else 1
        speed = {"tokens_per_second": 4000 * factor, "step_seconds": 1 / factor, "own_runs": scaled}
        found = compared_speed(dataclasses.replace(predicted, **speed), **LATER | changed)
        assert (found["ratio"], found["predicted"]) == (ratio and pytest.approx(ratio), pytest.approx(4000))
        assert found["setup"] == predicted.speed_setup
    assert compared_speed(dataclasses.replace(predicted, generation_share=0.6), **LATER)["ratio"] is None
    assert compared_speed(None, **LATER) is None
    assert compared_speed(predicted, **LATER | {"tokens": 0}) is None


def test_a_run_is_kept_once_and_only_where_it_says_something(tmp_path, monkeypatch, caplog):
    report = {"date": "2026-11-28T10:00:00+00:00", "speed": {"setup": "a", "ratio": 0.7}, "command": "secret"}
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(tmp_path / "runs"))
    keep_run(report | {"speed": None}, str(tmp_path / "out"))
    keep_run(report | {"speed": {"ratio": None}}, str(tmp_path / "out"))
    keep_run(report, str(tmp_path / "runs" / "out"))  # whose own report is below the folder
    assert not (tmp_path / "runs").exists()
    keep_run(report, str(tmp_path / "out"))
    (kept,) = (tmp_path / "runs").iterdir()
    assert "secret" not in kept.read_text()
    assert own_runs.own_runs("a") == OwnRuns(0.7, 1, None)
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(kept))
    keep_run(report, str(tmp_path / "out"))
    assert "this run's speed is not kept" in caplog.text


LOGGED = "{'train_runtime': 4000.0, 'train_samples_per_second': %s, 'train_steps_per_second': 0.1}"
PREDICTED = {"step_seconds": 2.0, "tokens_per_second": 4000.0, "speed_setup": "a"}


@pytest.mark.parametrize(
    ("text", "ratio"),
    [
        (LOGGED % 6.4, 0.8),
        (LOGGED % 1.0 + "\n 5 steps\n" + LOGGED % 4, 0.5),
        (json.dumps({"log_history": [{"loss": 1.0}, {"train_samples_per_second": 8.0}]}, indent=1), 1.0),
        ("train_samples_per_second = 7.2e0", 0.9),
        ("***** train metrics *****\n  train_samples_per_second =      16.0\n", 2.0),
        ("loss 3.2", "has no train_samples_per_second"),
        (LOGGED % 0, "inf s a step, where 2 s are predicted, is of another job"),
        (LOGGED % 8e5, "2e-05 s a step, where 2 s are predicted, is of another job"),
    ],
)
def test_a_log_of_another_trainer_teaches(text, ratio, predicted, tmp_path, monkeypatch):
    """A step has 16 samples."""
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "train.log").write_text(text)
    plain = dataclasses.replace(predicted, **PREDICTED)
    scaled = dataclasses.replace(plain, step_seconds=4.0, own_runs=OwnRuns(0.5, 1, None))
    for found in (plain, scaled):
        if isinstance(ratio, str):
            with pytest.raises(InputError, match=ratio):
                own_runs.learn_from_log(found, 16, str(tmp_path / "train.log"))
            assert not (tmp_path / "runs").exists()
        else:
            said = own_runs.learn_from_log(found, 16, str(tmp_path / "train.log"))
            assert f"train.log: {2 / ratio:.3g} s a step, {ratio:.2f} × the predicted speed" in said
    own_runs._reports.cache_clear()
    assert own_runs.own_runs("a") == (None if isinstance(ratio, str) else OwnRuns(pytest.approx(ratio), 1, None))


@pytest.mark.parametrize(
    ("changed", "switch", "reason"),
    [
        ({"step_seconds": None}, "", "no speed is predicted"),
        ({"generation_share": 0.5}, "", "rests on what is generated"),
        ({}, "off", "HF_MEMOPT_RUNS and HF_MEMOPT_CALIBRATION must not be off"),
    ],
)
def test_a_log_that_cannot_teach(changed, switch, reason, predicted, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MEMOPT_RUNS", switch)
    (tmp_path / "train.log").write_text(LOGGED % 8)
    found = dataclasses.replace(predicted, **PREDICTED | changed)
    with pytest.raises(InputError, match=reason):
        own_runs.learn_from_log(found, 16, str(tmp_path / "train.log"))


def test_the_command_says_what_it_learned(command, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(tmp_path / "runs"))
    (tmp_path / "train.log").write_text(LOGGED % 8000)
    words = ("estimate", write_llama(tmp_path), *ASKED["the same"], "--seq-len", 64)
    assert "× the predicted speed: later answers" in command(*words, "--from-log", tmp_path / "train.log")[2]
    own_runs._reports.cache_clear()
    assert "from one of your runs" in command(*words)[1]
    code, _, errors = command(*words, "--from-log", tmp_path / "none.log")
    assert code == 2 and "none.log" in errors


@pytest.mark.kept
@pytest.mark.slow
def test_a_recipe_leaves_its_speed(recipe, tmp_path, monkeypatch, capsys):
    """On a CPU no speed is predicted: here it is said to be 1,000 tokens a second."""
    from hf_memopt.recipe import summary

    real = summary.predict
    said = {"tokens_per_second": 1000.0, "step_seconds": 0.256, "speed_setup": "a"}
    monkeypatch.setattr(summary, "predict", lambda *a, **more: dataclasses.replace(real(*a, **more), **said))
    monkeypatch.setenv("HF_MEMOPT_RUNS", str(tmp_path / "runs"))
    words = ("--max_steps", 8, "--max_length", 64, "--per_device_train_batch_size", 4, "--eval_strategy", "no")
    recipe("pretrain")([*map(str, words), "--output_dir", str(tmp_path / "out")])
    speed = json.loads((tmp_path / "out" / "memory_report.json").read_text())["speed"]
    assert speed["ratio"] == pytest.approx(speed["tokens_per_second"] / 1000)
    own_runs._reports.cache_clear()  # a process keeps the figures that it began with
    assert own_runs.own_runs("a").ratio == speed["ratio"]
    assert f"speed: {speed['tokens_per_second']:,.0f} tokens/s, where 1,000 were predicted" in capsys.readouterr().out
