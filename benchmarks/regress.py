"""Whether predictions are what they were: python benchmarks/regress.py [--freeze]

Asks hf-memopt every line of data/regress/commands.txt with --json, and compares the answers with results/regress.json:
bytes, settings, commands and refusals to the letter, speeds to 0.1 %. Of a line that begins with "printed" the text is
compared instead. What differs is printed, and the exit code is 1; --freeze writes what is answered now instead, with
names of lines, or parts of them, only theirs. Nothing in an answer depends on the machine: every line names its
hardware, and the calibration is off. tests/benchmarks/test_regress.py asks the lines of small models, and some of
the others.
"""

import contextlib
import io
import json
import multiprocessing
import os
import re
import shlex
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "benchmarks" / "data" / "regress"
FROZEN = ROOT / "benchmarks" / "results" / "regress.json"
# Texts that explain figures, and texts that another list of the same answer says in more detail.
LEFT_OUT = {"notes", "timeline", "versions", "levers", "model"}
TOLERANCE = 1e-3  # of what is no whole number: speeds, hours, shares


def answer(line: str) -> dict:
    """The exit code of a command and what it printed: JSON, or a refusal."""
    from hf_memopt.cli import main

    output, errors = io.StringIO(), io.StringIO()
    words = line.removeprefix("printed ")
    sys.argv = ["hf-memopt", *shlex.split(words), *(["--json"] if words == line else [])]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    if code == 2:
        refusals = [text for text in errors.getvalue().splitlines() if text.startswith("error: ")]
        return {"code": code, "refusal": refusals}
    if words != line:
        printed = re.sub(r" \\\n\s+", " ", output.getvalue())  # broken by the path of the clone
        return {"code": code, "printed": printed.replace(f"{ROOT}/", "").splitlines()}
    return {"code": code, "answer": without(json.loads(output.getvalue()))}


def asked() -> list[str]:
    """The lines of commands.txt, and for every file of a pattern there a line."""
    lines = []
    for line in (FOLDER / "commands.txt").read_text().splitlines():
        command, _, pattern = line.rpartition(" ")
        files = sorted(FOLDER.glob(pattern)) if "*" in pattern and not line.startswith("#") else []
        lines += [f"{command} {os.path.relpath(file, FOLDER)}" for file in files] or [line]
    return [line for line in lines if line and not line.startswith("#")]


def prepare() -> None:
    """Make the answers those of any machine."""
    from hf_memopt.cli.estimate import import_libraries
    from hf_memopt.hardware.allocator import SPELLINGS

    os.environ.update(HF_MEMOPT_CALIBRATION="off", COLUMNS="100")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.chdir(FOLDER)  # where the configurations are that commands name
    for name in SPELLINGS:  # reserved bytes follow the allocator's settings
        os.environ.pop(name, None)
    import_libraries()  # before the processes part


def without(value):
    """A copy without what is left out of the comparison."""
    if isinstance(value, dict):
        return {name: without(part) for name, part in value.items() if name not in LEFT_OUT}
    if isinstance(value, str):  # launch commands name files of this clone
        return value.replace(f"{ROOT}/", "")
    return [without(part) for part in value] if isinstance(value, list) else value


def differences(frozen, now, place: str = ""):
    """Lines that name a field, what was frozen and what it is now."""
    if isinstance(frozen, dict) and isinstance(now, dict):
        for name in sorted(frozen.keys() | now.keys()):
            yield from differences(frozen.get(name), now.get(name), f"{place}.{name}")
    elif isinstance(frozen, list) and isinstance(now, list) and len(frozen) == len(now):
        for number, (before, after) in enumerate(zip(frozen, now, strict=True)):
            yield from differences(before, after, f"{place}[{number}]")
    elif frozen != now and not near(frozen, now):
        yield f"{place.lstrip('.')}: {json.dumps(frozen)} is now {json.dumps(now)}"


def near(frozen, now) -> bool:
    """True for two numbers of which one is no whole number and that differ by less than TOLERANCE."""
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (frozen, now))
    return numbers and float in (type(frozen), type(now)) and abs(frozen - now) <= TOLERANCE * abs(frozen)


def main() -> int:
    from hf_memopt.estimator.tracing import parallel

    prepare()
    freezing, *chosen = "--freeze" in sys.argv, *(word for word in sys.argv[1:] if word != "--freeze")
    lines = [line for line in asked() if not chosen or any(part in line for part in chosen)]
    frozen = json.loads(FROZEN.read_text())
    answers, failed = {}, 0
    parallel._cores = lambda: 1  # every core has an answer of its own
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("fork"))
    try:
        for number, (line, found) in enumerate(zip(lines, pool.map(answer, lines), strict=True), 1):
            print(f"\r{number} of {len(lines)}", end="", file=sys.stderr, flush=True)
            answers[line] = found
            for text in () if freezing else differences(frozen.get(line), found):
                failed += 1
                print(f"\r{line}\n  {text[:300]}")
    finally:
        pool.shutdown(cancel_futures=True)  # what one answer's error leaves is not asked
    print(file=sys.stderr)
    if freezing:
        frozen = {line: (frozen | answers)[line] for line in asked() if line in frozen | answers}
        FROZEN.write_text(json.dumps(frozen, indent=1) + "\n")
        print(f"wrote {FROZEN}: {len(answers)} answers")
        return 0
    for line in frozen.keys() - set(asked()):
        failed += 1
        print(f"{line}\n  is no longer asked")
    print(f"{len(answers)} answers, {failed} differences")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
