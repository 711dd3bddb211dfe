"""make regress: what differs is named, to the byte of memory and to a thousandth of a speed."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import regress  # noqa: E402

from hf_memopt.hardware.allocator import SPELLINGS  # noqa: E402


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ({"bytes": 1001, "speed": 100.0}, ["bytes: 1000 is now 1001"]),
        ({"bytes": 1000, "speed": 100.05}, []),
        ({"bytes": 1000, "speed": 101.0}, ["speed: 100.0 is now 101.0"]),
        ({"bytes": 1000}, ["speed: 100.0 is now null"]),
    ],
)
def test_differences_are_named(now, named):
    assert list(regress.differences({"bytes": 1000, "speed": 100.0}, now)) == named


JOBS = ("estimate", "plan", "printed estimate", "printed plan")
SMALL = ("llama.json", "bert.json", "t5.json", "mixtral.json")


def lines(*, small):
    """The lines about models of a few layers, or the others."""
    jobs = [line for line in regress.asked() if line.startswith(JOBS)]
    return pytest.mark.parametrize("line", [line for line in jobs if any(map(line.count, SMALL)) == small])


@pytest.fixture
def asked(monkeypatch):
    """What hf-memopt answers in this process, on any machine."""
    monkeypatch.chdir(regress.FOLDER)
    for name in SPELLINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_MEMOPT_CALIBRATION", "off")
    monkeypatch.setenv("COLUMNS", "100")
    yield regress.answer
    logging.getLogger("hf_memopt").setLevel(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["presets", "show", "advise", "migrate"])
def test_texts_are_those_that_were_frozen(command, asked, subtests):
    frozen = json.loads(regress.FROZEN.read_text())
    for line in [line for line in regress.asked() if line.startswith(f"printed {command}")]:
        with subtests.test(line=line):
            assert not list(regress.differences(frozen[line], asked(line)))


@pytest.mark.drawn(5)
@lines(small=True)
def test_small_answers_are_those_that_were_frozen(line, asked):
    """Every figure and word of them; make regress ARGS=--freeze, where they are meant to change."""
    assert not list(regress.differences(json.loads(regress.FROZEN.read_text())[line], asked(line)))


@pytest.mark.slow
@lines(small=False)
def test_other_answers_are_those_that_were_frozen(line, asked):
    assert not list(regress.differences(json.loads(regress.FROZEN.read_text())[line], asked(line)))


PROGRAM = """
import sys, regress
from pathlib import Path
folder = Path(sys.argv.pop())
regress.FOLDER, regress.FROZEN = folder, folder / "frozen.json"
sys.exit(regress.main())
"""


@pytest.mark.slow
def test_a_frozen_answer_that_is_another_fails(tmp_path):
    """One line is asked again, whose frozen answer is a byte off."""
    frozen = json.loads(regress.FROZEN.read_text())
    line = "estimate llama.json --hardware cpu --seq-len 128"
    answer = json.loads(json.dumps(frozen[line]))
    answer["answer"]["peak_allocated_bytes"] += 1
    shutil.copytree(regress.FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "commands.txt").write_text(line)
    (tmp_path / "frozen.json").write_text(json.dumps({line: answer}))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "1 answers, 1 differences" in done.stdout, done.stderr[-500:]
    assert "peak_allocated_bytes" in done.stdout
