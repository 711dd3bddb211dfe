"""Frames become the same pixels as in transformers' video processors, which need torchvision."""

import sys
from pathlib import Path

import pytest
import videos
from conftest import ROOT, run

TORCHVISION = Path(sys.prefix) / "torchvision"  # apart: a build that does not fit torch breaks transformers


@pytest.mark.slow
def test_pixels_and_samples_equal_transformers_own(tmp_path):
    if not TORCHVISION.is_dir():
        pytest.skip("`make test` installs torchvision there")
    for frames in (5, 30):
        videos.write(tmp_path / f"{frames}.mp4", videos.numbered(frames, 60, 80))
    path = f"{TORCHVISION}:{ROOT}:{ROOT / 'tests'}"
    done = run(sys.executable, ROOT / "tests" / "video_parity.py", tmp_path, env={"PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["168", "6"]


def test_nothing_here_has_torchvision():
    """The other tests run where it cannot be imported."""
    import importlib.util

    assert importlib.util.find_spec("torchvision") is None
