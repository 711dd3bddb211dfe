"""Without a package: what needs it says so before any work starts."""

import importlib.util
import sys

import pytest

from hf_memopt.errors import InputError


@pytest.fixture
def without(monkeypatch):
    """A package that cannot be found any more."""
    real = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest)
        )

    return hide


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", "llama-3.1-405b", "--plot", "memory.png"),
        ("dry-run", "there_is_no.py", "--plot", "memory.png"),
        ("snapshot", "there_is_no.pickle", "--plot", "memory.png"),
        ("report", "there_is_no_run"),
    ],
)
def test_pictures_need_matplotlib(words, without, command, monkeypatch):
    import os

    monkeypatch.setattr(os, "_exit", sys.exit)  # how dry-run ends
    without("matplotlib")
    code, _, errors = command(*words)
    assert code == 2 and "needs matplotlib, which is not installed: pip install matplotlib" in errors


@pytest.mark.parametrize("package", ["datasets", "matplotlib"])
def test_recipes_say_what_they_need_before_they_load_anything(package, without, recipe, tmp_path):
    without(package)
    with pytest.raises(InputError, match=f"needs {package}, which is not installed"):
        recipe("sft")(["--preset", "cpu", "--output_dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_zero_needs_deepspeed(without, command):
    without("deepspeed")
    code, _, errors = command("estimate", "gpt2", "--preset", "a100_80gb_x8", "--strategy", "zero3")
    assert code == 2 and "strategy=zero3 needs deepspeed" in errors


def test_plans_without_deepspeed_leave_zero_out(without):
    from hf_memopt.planner.choices import available_strategies

    assert "zero3" in available_strategies()
    without("deepspeed")
    assert available_strategies() == ["ddp", "fsdp2"]


def test_no_fork_on_macos(monkeypatch):
    """Its system libraries crash in a fork of a process that has used them."""
    from hf_memopt.estimator.tracing import parallel

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not parallel._can_fork()
