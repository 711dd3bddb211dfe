"""Part 8: pytest -m cuda, the tests that need a card."""

import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.gpu.case import ROOT, Case
from hf_memopt.contrib.calibration.processes import Skip


def cases(rehearse: bool) -> list[Case]:
    """All of them in one process: most of a small test is its imports."""
    return [Case("cuda_tests", "pytest -m cuda", 13, rehearse=rehearse)]


def measure(case: Case) -> dict:
    """Numbers of tests by outcome, and the failures."""
    import importlib.util

    if importlib.util.find_spec("pytest") is None:
        raise Skip("pytest is not installed")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # addopts are of plugins that an image may lack.
        words = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "cuda", "tests/test_cuda.py"]
        words.append(f"--junitxml={report}")
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if not report.is_file():
            raise RuntimeError(done.stdout[-1000:] + done.stderr[-1000:])
        suite = ElementTree.parse(report).getroot().find("testsuite")
    failures = {
        test.get("name"): problem.get("message", "")[:500]
        for test in suite.iter("testcase")
        for problem in (*test.findall("failure"), *test.findall("error"))
    }
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return {**counts, "failed": failures}
