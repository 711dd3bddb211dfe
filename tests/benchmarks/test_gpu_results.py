"""Training jobs that were measured on cards: what is predicted for them today, on this machine."""

import json
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "benchmarks"))
from docs_tables.memory import card_errors

from benchmarks.gpu.tables import PREDICTED
from hf_memopt.contrib.calibration.training import Setting, predict
from hf_memopt.estimator.overheads import CHECKED
from hf_memopt.hardware import Hardware

FOLDERS = sorted((ROOT / "benchmarks" / "results" / "gpu").iterdir())
RUNS = [json.loads((folder / "results.json").read_text()) for folder in FOLDERS]
JOBS = {
    f"{run['hardware']['name']}: {row['case']}": (run["hardware"], row)
    for run in RUNS
    for row in run["rows"]
    if row["part"] in PREDICTED and row["outcome"] == "measured"
}
# Attention by torch's math kernel; the others have the same kernels as one another.
QUICK = "h200: estimator/full 0.5B, fp32"


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in JOBS if name != QUICK)]
)
def test_a_card_allocated_what_is_predicted(name):
    device, row = JOBS[name]
    predicted, measured = predict(Setting(**row["settings"]), Hardware(**device)), row["measured"]
    assert predicted["allocated_bytes"] == pytest.approx(measured["allocated_bytes"], rel=2e-4)
    assert predicted["reserved_bytes"]["expandable"] == pytest.approx(measured["reserved_bytes"], rel=0.035)
    beside = measured["device_bytes"] - measured["reserved_bytes"]
    assert predicted["beside_bytes"] == pytest.approx(beside, rel=0.025)


def test_what_an_estimate_says_of_reserved_bytes_was_measured():
    """Recorded predictions, as tables.py compares them, so that no job is traced."""
    errors = [error for folder in FOLDERS for error in card_errors(folder, "reserved")]
    assert f"{len(errors)} jobs on an H100 and an H200 were {min(errors):+.1%} to {max(errors):+.1%} off" == CHECKED
