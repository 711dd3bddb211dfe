"""The estimator against scripts as others write them: python benchmarks/estimator_scripts.py [NAME …]

Each script in tests/scripts is dry-run, and really trained for two steps on this CPU, in a folder with tiny models and
data. Its docstring ends with its command. The libraries are imported once; every run is a process forked after that.
"""

import ast
import contextlib
import importlib.util
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from record import record

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "tests" / "scripts").glob("*.py"))
LIBRARIES = ("torch", "transformers", "transformers.trainer", "datasets", "peft", "trl")


class Run(NamedTuple):
    """What a run returned, the seconds that it took, those of them that it computed, and the files that it left."""

    result: dict
    seconds: float
    cpu_seconds: float
    written: list[str]


def argv(script: Path) -> list[str]:
    """A script's arguments, from the command at the end of its docstring."""
    return shlex.split(_docstring(script).split(f"python {script.name}")[1])


def _docstring(script: Path) -> str:
    return ast.get_docstring(ast.parse(script.read_text()))


def missing(script: Path) -> str | None:
    """A package that a script needs and that is not installed."""
    names = re.findall(r"^(?:from|import) (\w+)", script.read_text(), flags=re.MULTILINE)
    return next((name for name in names if importlib.util.find_spec(name) is None), None)


def dry_run(script: Path) -> dict:
    """The estimate of the command with `--hardware cpu`."""
    from hf_memopt.estimator import estimate_trainer
    from hf_memopt.estimator.scripts.dry_run import caught_trainer
    from hf_memopt.estimator.scripts.launched import ScriptCommand

    with caught_trainer(ScriptCommand(str(script), argv(script)), "cpu") as trainer:
        return estimate_trainer(trainer, "cpu").to_dict()


def measure(script: Path) -> dict:
    """Bytes that were allocated at once over two real steps."""
    import script_truth

    return script_truth.measure(str(script), argv(script))


def forked(function: Callable[[Path], dict], script: Path, folder: Path) -> Run:
    """Run a function in a process of its own, in a folder that is home and the place of temporary files, too.

    Raises:
        RuntimeError: the function did not return.
    """
    before, started = set(folder.rglob("*")), time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        answer, log = Path(place, "answer"), Path(place, "log")
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _run_here(function, script, folder, answer, log)
            os._exit(0)
        _, _, usage = os.wait4(child, 0)
        seconds, used = time.perf_counter() - started, usage.ru_utime + usage.ru_stime
        if not answer.exists():
            raise RuntimeError(f"{script.stem}: {log.read_text()[-2000:]}")
        written = sorted(str(path.relative_to(folder)) for path in set(folder.rglob("*")) - before)
        return Run(json.loads(answer.read_text()), round(seconds, 1), round(used, 1), written)


def _run_here(function, script: Path, folder: Path, answer: Path, log: Path) -> None:
    os.chdir(folder)
    os.environ.update(HOME=str(folder), TMPDIR=str(folder))
    tempfile.tempdir = None
    said = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        answer.write_text(json.dumps(function(script)))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()


def row(script: Path, folder: Path) -> dict:
    """One row: predicted, measured, seconds, what was written."""
    predicted, measured = forked(dry_run, script, folder), forked(measure, script, folder)
    predicted_bytes, measured_bytes = predicted.result["peak_allocated_bytes"], measured.result["measured_bytes"]
    return {
        "script": script.stem,
        "kind": _docstring(script).split("\n\npython ")[0].replace("\n", " "),
        "predicted_bytes": predicted_bytes,
        "measured_bytes": measured_bytes,
        "error": round(predicted_bytes / measured_bytes - 1, 6),
        "phase": predicted.result["phase"],
        "seconds": predicted.seconds,
        "cpu_seconds": predicted.cpu_seconds,
        "written": predicted.written,
    }


def rows(scripts: list[Path]) -> tuple[list[dict], list[str]]:
    """A row for each script that can run here, and what went wrong with the others."""
    done, failures = [], []
    with tempfile.TemporaryDirectory() as place:
        quiet = {"HF_HOME": f"{place}/cache", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ.update(quiet, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
        for name in LIBRARIES:
            importlib.import_module(name)
        sys.path.append(str(ROOT / "tests"))
        import script_inputs

        folder = Path(place, "work")
        folder.mkdir()
        script_inputs.main(folder)
        for script in scripts:
            try:
                done.append(row(script, folder))
            except RuntimeError as error:
                failures.append(str(error))
            else:
                print(f"{done[-1]['error']:+9.3%}  {script.stem:<32} {done[-1]['cpu_seconds']:>5} s", flush=True)
    return done, failures


def main(names: list[str]) -> None:
    for script in SCRIPTS:
        if name := missing(script):
            print(f"{script.stem}: {name} is not installed")
    scripts = [path for path in SCRIPTS if missing(path) is None and (not names or path.stem in names)]
    done, failures = rows(scripts)
    if failures:
        raise SystemExit("\n".join(failures))
    print(f"{len(done)} scripts, median |error| {statistics.median(abs(row['error']) for row in done):.4%}")
    if not names:
        record("estimator_scripts", done)


if __name__ == "__main__":
    main(sys.argv[1:])
