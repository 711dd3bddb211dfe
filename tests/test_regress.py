"""make regress: what differs is named, to the byte of memory and to a thousandth of a speed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import regress  # noqa: E402


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


PROGRAM = """
import sys, regress
from pathlib import Path
regress.FOLDER, regress.FROZEN = Path(sys.argv[1]), Path(sys.argv[1]) / "frozen.json"
sys.exit(regress.main())
"""


def test_a_frozen_answer_that_is_another_fails(tmp_path):
    """One line is asked again, whose frozen answer is a byte off."""
    frozen = json.loads(regress.FROZEN.read_text())
    line = next(line for line in frozen if line.startswith("estimate") and "zero" not in line)
    answer = json.loads(json.dumps(frozen[line]))
    answer["answer"]["peak_allocated_bytes"] += 1
    shutil.copytree(regress.FOLDER, tmp_path, dirs_exist_ok=True)
    (tmp_path / "commands.txt").write_text(line)
    (tmp_path / "frozen.json").write_text(json.dumps({line: answer}))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "1 answers, 1 differences" in done.stdout, done.stderr[-500:]
    assert "peak_allocated_bytes" in done.stdout
