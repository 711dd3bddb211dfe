"""The CI matrix, as GitHub reads it, against setup.cfg and constraints.txt."""

import configparser
import shlex

import typer
import yaml
from conftest import ROOT

JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))["jobs"]


def _commands() -> list[str]:
    return [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]


def test_every_python_of_the_classifiers_is_tried():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    named = [line.rpartition(" :: ")[2] for line in config["metadata"]["classifiers"].split("\n") if " 3." in line]
    assert JOBS["systems"]["strategy"]["matrix"]["python"] == named


def test_torch_is_the_pinned_one():
    (pin,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    assert any(pin in command for command in _commands())


def test_its_commands_and_files_exist():
    from hf_memopt.cli.app import app

    group = typer.main.get_command(app)
    for line in _commands():
        words = shlex.split(line)
        if words[0] == "hf-memopt" and (command := group.get_command(None, words[1])):
            command.make_context(words[1], words[2:])
        assert all((ROOT / word).is_file() for word in words if word.startswith("tests/"))
