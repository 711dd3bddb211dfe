"""Whether tests notice a fault: python benchmarks/mutants.py [--count 200] [--seed N] [--only PART_OF_A_PATH]

Draws random mutants: a comparison, a sign, an arithmetic operator, a number or a condition changed inside a function,
on a line that quick tests run. Each is tried in a copy of the project with the tests that run its line until one
fails, or --seconds of tests have passed: those of its room and of frozen answers first, quickest first, and one of
every test function before second cases. What none notices is printed, and all go to out/mutants.json. Which test runs
which line is asked of coverage.py once for each state of the package (out/mutants/, some ten minutes); it needs
pytest-cov, which make mutants installs.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "mutants"
OTHER = {
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.In: ("in", "not in")},
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.IsNot: (r"is\s+not", "is"), ast.NotIn: (r"not\s+in", "in"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "/"), ast.Div: ("/", "*")},
    **{ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*")},
}
TIMED_OUT = 124
NOTICED = (1, 2, TIMED_OUT)  # pytest's codes of tests that failed; signals are below 0
MISSING = re.compile(r"^ERROR: not found: .*?(tests/[^\n]*)$", re.MULTILINE)
UNREAD = re.compile(r"^ERROR tests/", re.MULTILINE)  # a file of tests asks the package while it is read, and failed
MARGIN = 60  # seconds that a mutant's tests may take beside ten times what they took


@dataclass
class Mutant:
    file: str
    line: int
    start: int  # in characters of the file
    end: int
    text: str  # what stands there instead
    was: str = ""

    def source(self) -> str:
        source = (ROOT / self.file).read_text(encoding="utf-8")
        return source[: self.start] + self.text + source[self.end :]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


class _Places(ast.NodeVisitor):
    """The mutants of a file's functions."""

    def __init__(self, file: Path):
        self.source = file.read_text(encoding="utf-8")
        self.file, self.found, self.depth = str(file.relative_to(ROOT)), [], 0
        lines = self.source.splitlines(keepends=True)
        self.lines = lines
        self.begins = [0]
        for line in lines:
            self.begins.append(self.begins[-1] + len(line))
        self.visit(ast.parse(self.source))

    def at(self, line: int, column: int) -> int:
        """ast counts columns in bytes."""
        return self.begins[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def add(self, node, start: int, end: int, text: str) -> None:
        if self.depth:
            self.found.append(Mutant(self.file, node.lineno, start, end, text, self.source[start:end]))

    def whole(self, node, text: str) -> None:
        self.add(node, self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset), text)

    def between(self, left, right, operator) -> None:
        pattern, other = OTHER.get(type(operator), (None, None))
        if pattern is None:
            return
        start = self.at(left.end_lineno, left.end_col_offset)
        end = self.at(right.lineno, right.col_offset)
        word = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
        if found := re.search(word, self.source[start:end]):
            self.add(left, start + found.start(), start + found.end(), other)

    def _function(self, node) -> None:
        self.depth += 1
        for part in [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]:
            self.visit(part)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_JoinedStr(self, node) -> None:
        pass  # its parts have no places of their own in Python 3.11

    def visit_AnnAssign(self, node) -> None:
        if node.value:
            self.visit(node.value)

    def visit_Compare(self, node) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self.between(left, right, operator)
        self.generic_visit(node)

    def visit_BoolOp(self, node) -> None:
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between(left, right, node.op)
        self.generic_visit(node)

    def visit_BinOp(self, node) -> None:
        if not any(map(_is_text, (node.left, node.right))):
            self.between(node.left, node.right, node.op)
        self.generic_visit(node)

    def visit_UnaryOp(self, node) -> None:
        operand = ast.get_source_segment(self.source, node.operand)
        if isinstance(node.op, ast.USub):
            self.whole(node, f"(+{operand})")
        elif isinstance(node.op, ast.Not):
            self.whole(node, f"bool({operand})")
        self.generic_visit(node)

    def visit_keyword(self, node) -> None:
        if node.arg != "strict":  # of zip: an assertion, which no test of right code can see
            self.visit(node.value)

    def visit_Constant(self, node) -> None:
        if isinstance(node.value, bool):
            self.whole(node, str(not node.value))
        elif isinstance(node.value, int | float):
            self.whole(node, repr(node.value + 1))

    def _condition(self, node) -> None:
        self.whole(node.test, f"(not ({ast.get_source_segment(self.source, node.test)}))")
        self.generic_visit(node)

    visit_If = visit_IfExp = visit_While = _condition


def candidates(only: str) -> list[Mutant]:
    """Every mutant of the package that compiles."""
    files = sorted(path for path in (ROOT / "hf_memopt").rglob("*.py") if only in str(path))
    return [mutant for file in files for mutant in _Places(file).found]


def _state() -> str:
    """The package and its tests as they are."""
    digest = hashlib.sha256()
    for folder in ("hf_memopt", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def record() -> Path:
    """Run quick tests with coverage, unless this state was; returns the folder of coverage and times."""
    folder = OUT / _state()
    if (folder / "tests.xml").exists():
        return folder
    shutil.rmtree(OUT, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "rc").write_text(f"[run]\ndata_file = {folder / 'coverage'}\nparallel = True\n")
    measure = ["--cov=hf_memopt", f"--cov-config={folder / 'rc'}", "--cov-context=test", "--cov-report="]
    print("running the quick tests with coverage, some ten minutes", flush=True)
    subprocess.run([sys.executable, "-m", "pytest", *measure, f"--junitxml={folder / 'tests.xml'}"], cwd=ROOT)
    return folder


def tests_of_lines(folder: Path) -> dict[str, dict[int, list[str]]]:
    """File -> line -> the tests that run it, as pytest is asked for them."""
    from coverage.numbits import numbits_to_nums

    found: dict[str, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    rows = sqlite3.connect(folder / "coverage").execute(
        "select file.path, context.context, line_bits.numbits from line_bits "
        "join file on file.id = line_bits.file_id join context on context.id = line_bits.context_id "
        "where context.context like '%|run'"
    )
    for path, context, bits in rows:
        lines, test = found[str(Path(path).relative_to(ROOT))], context.removesuffix("|run")
        for line in numbits_to_nums(bits):
            lines[line].append(test)
    return found


def seconds(folder: Path) -> dict[str, float]:
    """What each test took."""
    cases = ElementTree.parse(folder / "tests.xml").iter("testcase")
    return {
        f"{case.get('classname').replace('.', '/')}.py::{case.get('name')}": float(case.get("time")) for case in cases
    }


def _is_near(test: str, file: str) -> bool:
    """Whether a test was written for the room of a file (or a file of the top level), or looks at whole answers."""
    room = Path(file).parts[1].removesuffix(".py")
    return test.startswith((f"tests/{room}/", f"tests/test_{room}.py", "tests/test_frozen"))


def chosen(file: str, tests: list[str], times: dict[str, float], limit: float) -> list[str]:
    """Tests that run a line of file, within limit seconds (and one at least).

    Those near it first; of both kinds quickest first, and one of every function before a second case.
    """
    by_function = defaultdict(list)
    for test in sorted(tests, key=lambda test: times.get(test, 1.0)):
        by_function[test.split("[")[0]].append(test)
    rounds = sorted(
        (not _is_near(test, file), place, times.get(test, 1.0), test)
        for cases in by_function.values()
        for place, test in enumerate(cases)
    )
    kept, spent = [], 0.0
    for *_, took, test in rounds:
        if kept and (spent + took > limit or len(kept) >= 400):
            continue
        kept.append(test)
        spent += took
    return kept


def _copy(number: int) -> Path:
    """The project as it is, without what git ignores."""
    copy = OUT / f"copy{number}"
    shutil.rmtree(copy, ignore_errors=True)
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    (copy / ".venv").symlink_to(Path(sys.prefix))
    return copy


def _serve() -> None:
    """In a copy: a fork for each line of standard input, which runs pytest with its words; answers the exit code."""
    os.environ.update(
        CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )
    os.environ.update(OMP_NUM_THREADS="1", LOCAL_SIZE="1")
    for name in ("HF_HOME", "HF_MEMOPT_CACHE"):
        os.environ[name] = str(Path.cwd() / ".pytest_cache" / name)
    import bitsandbytes  # noqa: F401
    import datasets  # noqa: F401
    import hypothesis  # noqa: F401
    import peft  # noqa: F401
    import pytest
    import torch
    import transformers
    import trl  # noqa: F401

    _ = transformers.Trainer
    torch.set_num_threads(1)
    answers, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        if not (child := os.fork()):
            os.setsid()
            quiet = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(quiet, 1), os.dup2(quiet, 2)
            sys.path[:0] = [str(Path.cwd())]
            os._exit(int(pytest.main(["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *request["tests"]])))
        ends, code = time.monotonic() + request["limit"], None
        while code is None:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > ends:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                code = TIMED_OUT
            else:
                time.sleep(0.05)
        print(code, file=answers, flush=True)


def _try_all(mutants: list[tuple[Mutant, list[str], float]], number: int, done) -> None:
    """Try mutants one after the other in a copy of the project."""
    copy = _copy(number)
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__)), "--serve"],
        cwd=copy,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    while True:
        try:
            mutant, tests, took = mutants.pop()
        except IndexError:
            break
        file = copy / mutant.file
        original = file.read_bytes()
        file.write_text(mutant.source(), encoding="utf-8")
        log = OUT / f"log{number}"
        code = 4
        while code == 4 and tests:
            request = {"tests": tests, "limit": 10 * took + MARGIN, "log": str(log)}
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
            code, said = int(server.stdout.readline()), log.read_text(errors="replace")
            if UNREAD.search(said):
                code = 1
            elif code == 4:  # the cases of a table that the package fills are others now; the other tests are asked
                gone = tuple(f"{name}[" for name in MISSING.findall(said))
                left = [test for test in tests if not f"{test}[".startswith(gone)] if gone else []
                tests = left if len(left) < len(tests) else []
        file.write_bytes(original)
        done(mutant, tests, code, said[-2000:])
    server.stdin.close()
    server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="mutants (200)")
    parser.add_argument("--seed", type=int, help="draws the same ones again; a random one otherwise")
    parser.add_argument("--only", default="", help="files whose path contains this, such as planner/")
    parser.add_argument("--seconds", type=float, default=60, help="of tests, for each mutant (60)")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return _serve()
    os.environ["DRAWN_BY"] = _state()  # the copies have no commit, and must draw the cases that were recorded
    folder = record()
    lines, times = tests_of_lines(folder), seconds(folder)
    run = [mutant for mutant in candidates(asked.only) if lines.get(mutant.file, {}).get(mutant.line)]
    seed = random.randrange(2**31) if asked.seed is None else asked.seed
    drawn = random.Random(seed).sample(run, min(asked.count, len(run)))
    print(f"seed {seed}: {len(drawn)} of {len(run)} mutants on lines that quick tests run", flush=True)
    work = []
    for mutant in drawn:
        tests = chosen(mutant.file, lines[mutant.file][mutant.line], times, asked.seconds)
        work.append((mutant, tests, sum(times.get(test, 1.0) for test in tests)))
    results = []

    def done(mutant: Mutant, tests: list[str], code: int, log: str) -> None:
        noticed = code in NOTICED or code < 0  # tests that are not found (4, 5) have not looked
        results.append({**asdict(mutant), "tests": len(tests), "noticed": noticed, "code": code})
        if code not in (0, 1, TIMED_OUT):
            results[-1]["log"] = log
        if not noticed:
            place = f"{mutant.file}:{mutant.line}"
            text = (ROOT / mutant.file).read_text(encoding="utf-8").splitlines()[mutant.line - 1].strip()
            print(f"unnoticed by {len(tests):3}: {place}: {mutant.was!r} -> {mutant.text!r} in  {text}", flush=True)
        if len(results) % 20 == 0:
            print(f"{len(results)} of {len(drawn)}, {sum(one['noticed'] for one in results)} noticed", flush=True)

    with ThreadPoolExecutor(2) as pool:
        for number in range(2):
            pool.submit(_try_all, work, number, done)
    share = sum(one["noticed"] for one in results) / max(1, len(results))
    print(f"seed {seed}: {sum(one['noticed'] for one in results)} of {len(results)} noticed, {share:.0%}")
    text = json.dumps({"seed": seed, "count": len(results), "noticed": share, "mutants": results}, indent=1)
    (ROOT / "out" / "mutants.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
