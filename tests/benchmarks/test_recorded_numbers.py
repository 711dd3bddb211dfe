"""No stale number: what benchmarks/results say is predicted is predicted today.

Rows of every file are drawn by the commit, each a job of seconds; make test-sweeps asks all of them. Results whose
predictions a test measures again stand elsewhere (test_scripts.py, test_grpo_estimates.py, test_video_recipe.py).
"""

import importlib
import json
import sys
import warnings
from importlib.util import find_spec

import pytest
from conftest import ROOT

from hf_memopt.compatibility.rules import PACKAGES

sys.path.insert(0, str(ROOT / "benchmarks"))


def recorded(name, kept=lambda row: True):
    """A file's rows that can be asked again."""
    rows = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    cases = [(number, row) for number, row in enumerate(rows) if kept(row)]
    return pytest.mark.parametrize("row", [row for _, row in cases], ids=[str(number) for number, _ in cases])


def check(name, row, benchmark=""):
    """Bytes, phases and refusals to the letter, speeds to what is recorded of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a benchmark's process takes what transformers deprecates for no failure
        now = importlib.import_module(benchmark or name).again(row)
    was = {key: row.get(key) for key in now}
    assert json.loads(json.dumps(now)) == was, f"stale: run python benchmarks/{benchmark or name}.py"


@pytest.mark.drawn(1)
@recorded("estimator_cpu", lambda row: row["layers"] <= 8)
def test_a_job_on_a_cpu(row):
    check("estimator_cpu", row)


@pytest.mark.drawn(1)
@recorded("estimator_optimizers", lambda row: find_spec(PACKAGES.get(row["optim"], "torch")))
def test_an_optimizer(row):
    check("estimator_optimizers", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("estimator_model_types")
def test_a_model_type(row):
    check("estimator_model_types", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("estimator_published")
def test_a_published_peak(row):
    check("estimator_published", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("estimator_peft")
def test_an_adapter_of_pefts_comparison(row):
    check("estimator_peft", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("speed_published")
def test_a_published_speed(row):
    check("speed_published", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("speed_generated")
def test_a_published_step_of_grpo(row):
    check("speed_generated", row)


@pytest.mark.slow
@recorded("engines")
def test_an_engine(row):
    check("engines", row)


@pytest.mark.slow
@recorded("levers", lambda row: "predicted_bytes" in row and "streamed" not in row["lever"])
def test_a_lever(row):
    check("levers", row)


@pytest.mark.slow
@recorded("cards", lambda row: "phase" in row)
def test_what_runs_on_which_card(row):
    check("cards", row, "predictions")


@pytest.mark.slow
@recorded("clusters")
def test_a_cluster(row):
    check("clusters", row, "predictions")


@pytest.mark.slow
@recorded("trl", lambda row: "task" in row)
def test_a_trainer_of_trl(row):
    check("trl", row, "predictions")


@pytest.mark.slow
@recorded("offloading")
def test_how_much_longer_a_step_takes_with_offloading(row):
    check("offloading", row, "predictions")


@pytest.mark.slow
@recorded("plans", lambda row: "guide_gb" in row)
def test_a_guides_job(row):
    check("plans", row, "predictions")


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("grpo_plans")
def test_a_plan_of_grpo_beside_its_authors_settings(row):
    assert row["time"] <= 1 and row["plan_device_bytes"] <= row["plan_capacity_bytes"]
    check("grpo_plans", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("large_plans")
def test_a_plan_of_a_long_or_large_job(row):
    check("large_plans", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("vlm_plans")
def test_a_plan_of_pictures_beside_settings_by_hand(row):
    assert max(found["faster"] for found in row["by_hand"].values()) < 0.03
    check("vlm_plans", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("small_cards")
def test_a_mixture_on_a_small_card(row):
    check("small_cards", row)


@pytest.mark.slow
@pytest.mark.drawn(1)
@recorded("long_samples")
def test_a_long_sample(row):
    check("long_samples", row)
