"""benchmarks.gpu without a card: every part is rehearsed on the CPU, cut off, resumed, and its tables are made."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT))
from benchmarks.gpu import tables
from benchmarks.gpu.__main__ import PARTS, all_cases
from benchmarks.gpu.case import Case, Results

# A recorded header: no such card was here.
HEADER = {
    "rehearsal": True,
    "hardware": {"label": "a card"},
    "driver": None,
    "cuda": None,
    "versions": {},
    "command": "python -m benchmarks.gpu",
}
SETTINGS = {"kind": "LoRA", "model": "gpt2"}


def row(name: str, part: str = "estimator", **more) -> dict:
    measured = {
        "allocated_bytes": 100,
        "reserved_bytes": 200,
        "device_bytes": 400,
        "allocator": "",
        "outcome_of_training": "trained",
        "step_seconds": 2.0,
        "tokens_per_second": 10.0,
    }
    return {
        "case": f"{part}/{name}",
        "part": part,
        "settings": SETTINGS,
        "outcome": "measured",
        "measured": measured,
        **more,
    }


def rehearse(folder, *words) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.gpu", "--rehearse", "--out", str(folder), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def measured(folder) -> dict[str, dict]:
    content = json.loads((folder / "rehearsal" / "results.json").read_text())
    return {row["case"]: row for row in content["rows"]}


def test_every_part_has_cases_in_one_order_of_worth():
    cases = all_cases(list(PARTS), rehearse=False)
    assert {case.part for case in cases} == set(PARTS)
    assert len({case.key for case in cases}) == len(cases), "two cases of one name: the second would be skipped"
    assert max(case.limit for case in cases) <= 90
    assert {case.part for case in cases[:15]} >= {"estimator", "speed", "oom"}
    assert sum(case.part == "estimator" for case in cases) >= 40


def test_rows_outlive_the_process_and_failed_ones_are_tried_again(tmp_path):
    first = Results(tmp_path / "card", HEADER)
    first.add(row("a"))
    first.add(row("b", outcome="failed", reason="killed"))
    (tmp_path / "card" / ".results.json.1.ab").write_text("torn")  # of a process that was killed while it wrote
    again = Results(tmp_path / "card", HEADER)
    assert again.is_measured(Case("estimator", "a", 0)) and not again.is_measured(Case("estimator", "b", 0))
    assert [path.name for path in (tmp_path / "card").iterdir()] == ["results.json"]
    assert not Results(tmp_path / "card", HEADER, fresh=True).rows


def test_tables_hold_errors_by_kind_and_what_was_not_measured():
    predicted = {
        "allocated_bytes": 110,
        "reserved_bytes": {"segments": 190, "expandable": 1},
        "beside_bytes": 230,
        "step_seconds": 1.0,
    }
    rows = [row("a"), row("b", "oom", measured={"hits": ["forward 3"]}), row("c", outcome="failed", reason="why\n|")]
    results = {**HEADER, "rows": rows}
    made = tables.build(results, {json.dumps(SETTINGS, sort_keys=True): predicted})
    (line,) = [line for line in made["Error by kind"] if line["kind"] == "LoRA"]
    assert line["mean error of allocated_bytes"] == 0.1 and line["mean error of reserved_bytes"] == 0.05
    assert line["mean error of device_bytes"] == 0.05  # 190 of the segments in force and 230 beside them, of 400
    assert made["Speed"][0]["predicted over measured"] == 0.5
    assert made["oom"] == [{"case": "b", "hits": ["forward 3"]}]
    refused = tables.build(results, {json.dumps(SETTINGS, sort_keys=True): {"refused": "not modelled yet"}})
    assert refused["Not predicted"] == [{"case": "estimator/a", "reason": "not modelled yet"}]
    page = tables.as_markdown(results, made)
    assert "estimator/c" in page and "+10.00%" in page and "rehearsal" in page


def test_without_a_card_it_says_so(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--tables", "--out", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "nothing was measured yet" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--parts", "speeed"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "speed" in done.stderr


@pytest.mark.slow
@pytest.mark.sweep  # two minutes; the parts' own tests remain
@pytest.mark.timeout(1800)
def test_every_part_is_rehearsed_though_the_first_run_is_killed(tmp_path):
    process = rehearse(tmp_path)
    path = tmp_path / "rehearsal" / "results.json"
    while not path.is_file():  # the test's own time limit ends it where no row ever comes
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = measured(tmp_path)
    assert before
    resumed = rehearse(tmp_path, "--resume")
    output, _ = resumed.communicate()
    assert resumed.returncode == 0, output
    rows = measured(tmp_path)
    assert before.items() <= rows.items(), "a row was measured again"
    assert not [row for row in rows.values() if row["outcome"] == "failed"], output
    assert rows.keys() == {case.key for case in all_cases(list(PARTS), rehearse=True)}
    made = json.loads((tmp_path / "rehearsal" / "tables.json").read_text())
    assert set(PARTS) - {"estimator", "speed"} <= made.keys()
    jobs = [row for row in rows.values() if row["part"] in tables.PREDICTED and row["outcome"] == "measured"]
    errors = made["Memory, predicted beside measured"]
    refused = made.get("Not predicted", [])
    assert len(errors) + len(refused) == len(jobs), "a job without a prediction"
    assert all("not modelled yet" in line["reason"] for line in refused)
    assert all(abs(line["error of allocated_bytes"]) < 0.01 for line in errors if line["kind"] == "optimizer")
    assert rows["oom/card too small"]["measured"]["weights_error"] < 1e-3
    page = (tmp_path / "rehearsal" / "tables.md").read_text()
    assert "## Error by kind" in page and "say nothing about a card" in page


def test_a_wheel_of_bitsandbytes_keeps_the_library_of_one_cuda(tmp_path):
    import zipfile

    from benchmarks.gpu.wheels import keep_one_library

    wheel = tmp_path / "bitsandbytes-1-py3-none-any.whl"
    libraries = [f"bitsandbytes/libbitsandbytes_{name}.so" for name in ("cpu", "cuda118", "cuda130", "rocm70")]
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("bitsandbytes/__init__.py", *libraries):
            made.writestr(name, name)
    keep_one_library(wheel, "cuda130")
    with zipfile.ZipFile(wheel) as kept:
        assert kept.namelist() == ["bitsandbytes/__init__.py", libraries[0], libraries[2]]
        assert kept.read(libraries[2]).decode() == libraries[2]
    assert list(tmp_path.iterdir()) == [wheel]
    with pytest.raises(SystemExit, match="has cpu, cuda130, and not cuda99"):
        keep_one_library(wheel, "cuda99")
