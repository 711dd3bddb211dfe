"""Without a package: what needs it says so before any work starts."""

import configparser
import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import sys

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

from hf_memopt.cli.doctor import _REQUIRED
from hf_memopt.errors import InputError
from hf_memopt.packages import EXTRAS, SOURCE, extras_for, how_to_install
from hf_memopt.stack.declared import _classes


@pytest.fixture
def without(monkeypatch):
    """A package that cannot be found any more; what was read of it meanwhile is forgotten."""
    real = importlib.util.find_spec

    def hide(package: str) -> None:
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == package else real(name, *rest)
        )

    yield hide
    _classes.cache_clear()


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
    assert code == 2 and "needs matplotlib, which is not installed: pip install 'matplotlib" in errors


@pytest.mark.drawn(1)
@pytest.mark.parametrize("package", ["datasets", "matplotlib", "trl"])
def test_recipes_say_what_they_need_before_they_load_anything(package, without, recipe, tmp_path):
    without(package)
    with pytest.raises(
        InputError, match=rf"needs {package}, which is not installed: pip install '(matplotlib|datasets)"
    ):
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
    assert available_strategies() == ["ddp", "fsdp2", "fsdp2_offload_cpu"]


def test_a_plan_says_that_zero_was_not_tried(without):
    from hf_memopt.job.spec import JobSpec
    from hf_memopt.planner.devices import resolve_preset
    from hf_memopt.planner.profiles import Plan

    def notes(hardware: str) -> str:
        return " ".join(Plan(JobSpec(model="x", preset=resolve_preset(hardware, "lora")), [], []).notes)

    assert "ZeRO" not in notes("a100_80gbx8")
    without("deepspeed")
    assert "ZeRO was not tried: deepspeed is not installed: pip install 'deepspeed" in notes("a100_80gbx8")
    assert "ZeRO" not in notes("a100_80gb")


def test_an_exported_recipe_that_would_not_start_here_is_noted(without, command, tmp_path):
    code, output, _ = command("export", "a100_80gb_x8", tmp_path / "run", "--strategy", "zero3", "--recipe", "dpo")
    assert code == 0 and "note:" not in output
    without("trl")
    code, output, _ = command("export", "a100_80gb_x8", tmp_path / "run", "--strategy", "zero3", "--recipe", "dpo")
    assert code == 0
    (note,) = (line for line in output.splitlines() if line.startswith("note: "))
    assert note.startswith("note: recipes/dpo.py needs trl, which is not installed here: pip install ")
    assert all(f"'{name}" in note for name in ("trl<", "datasets<", "deepspeed<"))


def test_each_named_extra_installs_its_package():
    """Whoever follows an error's advice gets what was missing."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]

    def names(extra: str) -> set[str]:
        asked = [Requirement(line) for line in extras[extra].split("\n") if line.strip()]
        own = {one.name for one in asked if one.name != "hf_memopt"}
        return own.union(*(names(inner) for one in asked if one.name == "hf_memopt" for inner in one.extras))

    for package, extra in EXTRAS.items():
        assert {"PIL": "pillow"}.get(package, package) in names(extra)
    for recipe in ("pretrain", "sft", "dpo", "grpo", "video_sft"):
        assert {"datasets", "matplotlib"} <= names(extras_for(recipe, "none"))
        assert extras_for(recipe, "zero3") == f"{extras_for(recipe, 'none')},deepspeed"


def test_what_a_plain_install_brings_is_never_an_extra():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    plain = {Requirement(line).name for line in config["options"]["install_requires"].split("\n") if line.strip()}
    assert not plain & set(EXTRAS) and set(_REQUIRED) <= plain


def test_no_fork_on_macos(monkeypatch):
    """Its system libraries crash in a fork of a process that has used them."""
    from hf_memopt.estimator.tracing import parallel

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not parallel._can_fork()


# What pip may be asked to install: other packages, a clone, its parts, and the wheel that packages.SOURCE names.
_INSTALLS = re.compile(r"pip3? install ([^\n`#|]*)")


def test_nothing_says_to_install_what_no_index_has():
    """hf_memopt comes from a clone or its wheel."""
    places = [ROOT / "README.md", ROOT / "SKILL.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "space"]
    places += [
        ROOT / name for name in ("docs", "notebooks", "recipes", "hf_memopt", "accelerate_configs", "CHANGELOG.md")
    ]
    endings = {".md", ".ipynb", ".py", ".txt", ".toml", ".yaml", ".sbatch", ""}
    files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*"))]
    found = 0
    for file in files:
        if file.suffix not in endings or not file.is_file():
            continue
        for line in file.read_text(encoding="utf-8").splitlines():
            for asked in _INSTALLS.findall(line):
                if "memopt" not in asked.lower().replace("hf_memopt_package", ""):
                    continue
                found += 1
                assert SOURCE in asked, f"{file}: {line}"
            assert not re.search(r"hf[_-]memopt\[\w+\](?!.*( @|\n))", line), f"{file}: {line}"
    assert found >= 2, "README and the notebook name the wheel"
    name, version, *_ = SOURCE.removeprefix("./").split("-")
    assert (name, version) == ("hf_memopt", importlib.metadata.version("hf_memopt"))


def test_what_installs_a_missing_package_needs_no_source_of_this_one(subtests):
    for package in [*EXTRAS, "timm"]:
        with subtests.test(package=str(package)):
            words = shlex.split(how_to_install(package))
            assert words[:2] == ["pip", "install"]
            names = {Requirement(word).name for word in words[2:]}
            assert {"PIL": "pillow"}.get(package, package) in names and "hf_memopt" not in names


@pytest.mark.parametrize("target", ["skypilot", "hf-jobs", "kubernetes"])
def test_exported_jobs_say_what_they_install(target, command, tmp_path):
    assert command("export", "a100_80gb", tmp_path, "--target", target)[0] == 0
    script = (tmp_path / "train.sh").read_text()
    assert f"${{HF_MEMOPT_PACKAGE:-{SOURCE}[trl]}}" in script
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HF_MEMOPT_PACKAGE": "nowhere"}
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "python3").chmod(0o755)
    done = subprocess.run(["sh", "train.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (
        done.returncode == 2 and "train.sh: hf_memopt cannot be installed from nowhere: put its wheel" in done.stderr
    )


def test_a_checkout_that_is_not_installed_names_the_package(monkeypatch):
    from importlib import metadata

    from hf_memopt import packages

    def nothing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", nothing)
    assert packages.how_to_install("torchvision") == "pip install torchvision"
    assert packages.how_to_install("PIL") == "pip install pillow"
