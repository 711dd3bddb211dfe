"""Every model type that takes videos trains, or is refused with the reason: a tiny model of each."""

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

TORCHVISION = Path(sys.prefix) / "torchvision"  # with timm; apart: a build that does not fit torch breaks transformers
RESULTS = ROOT / "benchmarks" / "results" / "video_families.json"
# Those that docs/video.md and the recipe promise.
PROMISED = {
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm46v"),
    *("llava_next_video", "video_llava", "internvl", "perception_lm", "gemma4", "smolvlm", "llava_onevision"),
}


def outcomes(rows: list[dict]) -> dict[str, dict[str, str]]:
    """By model type: whether it works, with an image or a second video too, or why not."""
    names = ("outcome", "reason", "image", "second_video")
    return {row["model_type"]: {name: row[name] for name in names if name in row} for row in rows}


@pytest.mark.slow
@pytest.mark.sweep  # a minute of twenty families; test_video_recipe.py trains the usual ones
def test_every_type_trains_or_is_refused(tmp_path):
    """The benchmark asserts that a batch has the loss of its samples, which depends on their pixels."""
    if not TORCHVISION.is_dir():
        pytest.skip("`make test` installs torchvision there")
    path = f"{TORCHVISION}:{ROOT}:{ROOT / 'benchmarks'}"
    program = (
        "import json, sys, video_families as tried; from tiny_video_models import video_types;"
        "json.dump(tried.attempts(video_types()), open(sys.argv[1], 'w'))"
    )
    done = run(sys.executable, "-c", program, tmp_path / "rows.json", env={"PYTHONPATH": path}, timeout=580)
    assert done.returncode == 0, done.stderr[-3000:]
    tried = outcomes(json.loads((tmp_path / "rows.json").read_text()))
    assert tried == outcomes(json.loads(RESULTS.read_text())["rows"])


@pytest.mark.slow
def test_promised_types_work():
    recorded = outcomes(json.loads(RESULTS.read_text())["rows"])
    assert {recorded[kind]["outcome"] for kind in PROMISED} == {"works"}
    assert all(row["outcome"] == "works" or row["reason"] for row in recorded.values())
