"""What choosing by predicted speed loses on published runs (benchmarks/speed_published.py)."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from record import RESULTS
from speed_published import regrets

_MOST = 0.05  # of the fastest setting's speed


@pytest.fixture(scope="module")
def losses():
    return regrets(json.loads((RESULTS / "speed_published.json").read_text())["rows"])


def test_the_choice_is_near_the_fastest_within_a_method(losses):
    within = [loss for loss in losses if loss["method"] != "any"]
    assert len(within) > 30 and all(loss["regret"] <= _MOST for loss in within)


def test_it_is_so_over_all_methods(losses):
    over = [loss for loss in losses if loss["method"] == "any"]
    assert {loss["n_gpus"] for loss in over} == {1, 2} and all(loss["regret"] <= _MOST for loss in over)
