"""Training scripts as others write them (tests/scripts): each is dry-run, and really trained for two steps."""

import json
import sys

import pytest
from conftest import ROOT, run

sys.path.insert(0, str(ROOT / "benchmarks"))

import estimator_scripts

RUN = """
import json, sys
sys.path.insert(0, "benchmarks")
import estimator_scripts

names = sys.argv[2:]
rows, failures = estimator_scripts.rows([path for path in estimator_scripts.SCRIPTS if path.stem in names])
open(sys.argv[1], "w").write(json.dumps({"rows": {row["script"]: row for row in rows}, "failures": failures}))
"""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    """Rows of all scripts that the selected tests ask for, from one process, which imports the libraries once."""
    names = [item.callspec.params["script"].stem for item in request.session.items if "results" in item.fixturenames]
    names = [name for name in names if not estimator_scripts.missing(ROOT / "tests" / "scripts" / f"{name}.py")]
    file = tmp_path_factory.mktemp("scripts") / "rows.json"
    done = run(sys.executable, "-c", RUN, file, *names, timeout=3600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("script", estimator_scripts.SCRIPTS, ids=lambda script: script.stem)
def test_a_script_takes_what_its_dry_run_says_and_that_leaves_no_file(script, results):
    if name := estimator_scripts.missing(script):
        pytest.skip(f"needs {name}")
    assert script.stem in results["rows"], results["failures"]
    row = results["rows"][script.stem]
    assert row["error"] == pytest.approx(0, abs=0.01)
    assert row["written"] == []


def test_there_are_at_least_twenty_five_and_all_say_their_command():
    assert len(estimator_scripts.SCRIPTS) >= 25
    assert all(isinstance(estimator_scripts.argv(script), list) for script in estimator_scripts.SCRIPTS)
