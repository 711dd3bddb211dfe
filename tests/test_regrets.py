"""What choosing by predicted speed loses on published runs (benchmarks/speed_published.py)."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from record import RESULTS
from speed_published import regrets

_MOST = 0.05  # of the fastest setting's speed


@pytest.fixture(scope="module")
def losses():
    return regrets(json.loads((RESULTS / "speed_published.json").read_text())["rows"])


def test_within_a_method_the_choice_is_near_the_fastest(losses):
    within = [loss for loss in losses if loss["method"] != "any"]
    assert len(within) > 30 and all(loss["regret"] <= _MOST for loss in within)


def test_over_methods_it_is_so_on_one_gpu(losses):
    over = [loss for loss in losses if loss["method"] == "any"]
    assert all(loss["regret"] <= _MOST for loss in over if loss["n_gpus"] == 1)
    missed = [loss for loss in over if loss["regret"] > _MOST]
    assert len(missed) <= len(over) // 5 and all(loss["fastest_error"] < loss["chosen_error"] for loss in missed)
