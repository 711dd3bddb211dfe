"""Nothing here may reach a hub: models and data are made by the tests."""

import gc
import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache"
sys.path += map(str, {file.parent for file in ROOT.glob("tests/*/test_*.py")})  # some tests share what others make

# Settings of a launch, the allocator, caches beside HF_HOME, calibrations, and a terminal (rich, typer).
_LAUNCHED = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "SLURM_", "TORCHELASTIC_")
_FOREIGN = {
    *("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    *("HF_DATASETS_CACHE", "HF_MODULES_CACHE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ASSETS_CACHE"),
    *("HF_MEMOPT_CALIBRATION", "HF_MEMOPT_RUNS"),
    *("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "GITHUB_ACTIONS"),
}


def _foreign() -> list[str]:
    """Names in the environment that would change what is tested."""
    return [name for name in os.environ if name in _FOREIGN or name.startswith(_LAUNCHED)]


def pytest_configure(config):
    """Before anything is imported that reads them. Not when this file is imported: scripts that tests launch do so,
    and need what their launcher has set."""
    for name in _foreign():
        del os.environ[name]
    from hypothesis import HealthCheck, settings

    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")
    if config.option.markexpr != "cuda":  # the same tests, with the same numbers, on every machine
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["DS_ACCELERATOR"] = "cpu"


_SOCKETS = 60  # characters of a folder that leave room for multiprocessing's sockets in it: 108 on Linux, 104 on macOS
_left_before: set[str] = set()


def pytest_sessionstart(session):
    """Give all processes of the tests a temporary folder of their own, which goes when they end: torch's launcher,
    DeepSpeed's compilations and processes that are killed leave what they made. Workers inherit it."""
    if hasattr(session.config, "workerinput"):
        return
    base = session.config._tmp_path_factory.getbasetemp()  # made in the usual place, before that changes
    _left_before.update(_left_by_launchers())
    folder = base / "t"
    if len(str(folder)) > _SOCKETS:
        folder = Path(tempfile.mkdtemp(prefix="tests-"))
    folder.mkdir(exist_ok=True)
    session.config.stash[_TEMPORARY] = (folder, tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    # What torch.compile keeps there is worth keeping.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(CACHE / "torchinductor"))


@pytest.hookimpl(trylast=True)  # when the workers have ended
def pytest_sessionfinish(session):
    """Remove the temporary folder; in CI fail if something lies beside it, where a process did not know of it."""
    if _TEMPORARY not in session.config.stash:
        return
    folder, usual = session.config.stash[_TEMPORARY]
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = usual
    left, kept = sorted(_left_by_launchers() - _left_before), [str(folder)] * folder.exists()
    # On a machine that others use, the folders may be of their launches.
    if kept or (left and os.environ.get("CI")):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if left or kept:
        session.config.get_terminal_writer().line(f"\nleft in {usual}: {', '.join(left + kept)}", red=True)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"cases were drawn by {drawn_by()}: DRAWN_BY={drawn_by()} draws them again")


_TEMPORARY = pytest.StashKey[tuple[Path, str]]()


def _left_by_launchers() -> set[str]:
    """Folders of torch's launcher (torch.distributed.elastic, DefaultLogsSpecs) among the temporary ones."""
    return {path.name for path in Path(tempfile.gettempdir()).glob("torchelastic_*")}


@pytest.fixture(autouse=True)
def _nothing_asked_of_the_allocator(monkeypatch):
    """What a test asks of CUDA's allocator, which a CPU build leaves alone, counts for that test."""
    monkeypatch.setattr("hf_memopt.hardware.allocator._left_alone", False)


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HOME"] = str(CACHE / "huggingface")
os.environ["HF_MEMOPT_CACHE"] = str(CACHE / "hf_memopt")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several tests run at once, some with two processes
# Or DeepSpeed asks a program, numactl, how many CPUs there are: hundreds of times in every trace of ZeRO-3.
os.environ.setdefault("LOCAL_SIZE", "1")

BIN = Path(sys.executable).parent
_ENVIRONMENT = os.environ
_COMPILERS = {name: os.environ[name] for name in ("CC", "CXX") if name in os.environ}


_frozen_modules = 0


def freeze_imports() -> None:
    """Leave what has been imported out of garbage collection. Every Trainer and every recovery collects all garbage;
    to look through millions of objects of torch and transformers each time took two thirds of the tests' time."""
    global _frozen_modules
    gc.collect()
    gc.freeze()
    _frozen_modules = len(sys.modules)


@pytest.fixture
def nothing_frozen():
    """Garbage collection as a user's process has it: what it finds, and when, shows in a trace's order of events."""
    gc.unfreeze()
    yield
    freeze_imports()


# Cases of one test in a run (of a quick one all, unless it says drawn), and how many runs it takes for each test to
# have its turn: make test has 3 minutes, make test-long 15.
_KEPT = {"engines": 2, "pages": 2, "slow": 1}
_TURNS = {None: 1, "engines": 3, "pages": 3, "slow": 4}
_SLICES = 50  # of the sweeps, one of which each CI run takes


@cache
def drawn_by() -> str:
    """What draws cases and a slice of the sweeps: the commit, so that a run can be repeated and others differ."""
    head = ["git", "-C", ROOT, "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(head, capture_output=True, text=True) if shutil.which("git") else None
    return os.environ.get("DRAWN_BY") or (found.stdout.strip() if found else "") or "0"


def _number(text: str) -> int:
    """The same in every process, other than hash()."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their markers
def pytest_collection_modifyitems(items):
    """Of a test with more cases than _KEPT, or its own drawn(number), that many are drawn where it has its turn; those
    marked as kept stay beside them. make test-sweeps runs the others, and make test-long a slice of them. Engines come
    first."""
    tests: dict[tuple[str, str | None, int], list] = {}
    for item in items:
        marks = {marker.name for marker in item.iter_markers()}
        kind = next((kind for kind in ("engines", "pages", "slow") if kind in marks), None)
        if not marks & {"sweep", "kept", "cuda"}:
            drawn = item.get_closest_marker("drawn")
            most = min(drawn.args[0] if drawn else len(items), _KEPT.get(kind, len(items)))
            tests.setdefault((item.nodeid.split("[")[0], kind, most), []).append(item)
    for (name, kind, most), cases in tests.items():
        if (_number(name) - _number(drawn_by())) % _TURNS[kind]:
            most = 0
        for item in sorted(cases, key=lambda item: _number(f"{drawn_by()} {item.nodeid}"))[most:]:
            item.add_marker("sweep")
    for item in items:
        if item.get_closest_marker("sweep") and _number(item.nodeid) % _SLICES == _number(drawn_by()) % _SLICES:
            item.add_marker("slice")
    # A worker that has nothing left takes tests from the end of another's list: modules whose fixtures start many
    # processes, which two workers would both do, stay whole at the beginning.
    items.sort(key=lambda item: not item.get_closest_marker("engines"))


def pytest_collection_finish(session):
    import transformers  # noqa: F401  whose log would else go to the captured stderr of the test that imports it first

    freeze_imports()
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) >= (os.cpu_count() or 1):
        from hf_memopt.estimator.tracing import parallel

        parallel._cores = lambda: 1  # forks of workers that have a core each gain nothing, and share no caches


@pytest.hookimpl(trylast=True)  # when the test's own fixtures are gone
def pytest_runtest_teardown(item):
    """What a test was the first to import (peft, DeepSpeed, torch's compiler) is as large as all before it."""
    if len(sys.modules) > _frozen_modules + 20:
        freeze_imports()


@pytest.hookimpl(tryfirst=True)  # before any fixture, of whatever scope, is set up
def pytest_runtest_setup(item):
    """No test sees what another one left. What has to be compiled is tested where it can be; anywhere else the reason
    is given."""
    if integration := sys.modules.get("transformers.integrations.deepspeed"):
        integration.unset_hf_deepspeed_config()  # of arguments that an earlier test's traceback keeps
    # datasets replaces it by a copy (Dataset.map with num_proc), while rich and others hold the real one.
    vars(os)["environ"] = _ENVIRONMENT
    for name in _foreign():
        del os.environ[name]
    # peft's BOFT (0.21, boft/layer.py) sets both to gcc for good where its kernel cannot be built. Every process with
    # another compiler than the last one's compiles DeepSpeed's operators anew, half a minute each time.
    for name in ("CC", "CXX"):
        os.environ.pop(name, None)
    os.environ.update(_COMPILERS)
    for marker, (there, reason) in _NEEDS.items():
        if item.get_closest_marker(marker) and not there():
            pytest.skip(reason)


@cache
def _has_compiler() -> bool:
    return all(shutil.which(os.environ.get("CXX", name)) for name in ("c++", "g++"))  # DeepSpeed's, torch.compile's


@cache
def _has_libaio() -> bool:
    from hf_memopt.hardware.compiler import has_libaio

    return has_libaio()


@cache
def _has_card() -> bool:
    import torch

    return torch.cuda.is_available()


_NEEDS = {
    "needs_compiler": (_has_compiler, "needs a C++ compiler (g++): install it, then make test-slow"),
    "needs_libaio": (_has_libaio, "needs libaio-dev: install it, then make test-sweeps"),
    "cuda": (_has_card, "needs an NVIDIA or AMD card, and pytest -m cuda"),
}


@pytest.fixture(scope="session")
def builtin_model() -> Path:
    from hf_memopt.data.builtin_model import builtin_model

    return builtin_model()


@pytest.fixture
def jsonl(tmp_path):
    """Writes rows to a jsonl file and returns its path."""

    def write(rows: list[dict], name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


@pytest.fixture
def no_progress_bars():
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if not shown:
        datasets.enable_progress_bars()


@pytest.fixture
def command(monkeypatch, capsys):
    """hf-memopt in this process, which has imported everything: exit code, output and errors."""

    def call(*words):
        from hf_memopt.cli import main

        monkeypatch.setattr(sys, "argv", ["hf-memopt", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    yield call
    logging.getLogger("hf_memopt").setLevel(logging.NOTSET)  # doctor raises it, as the last thing its process does


@pytest.fixture
def recipe(monkeypatch):
    """A recipe's main(argv), from recipes/. What keeps a run from being predicted, which a user's run goes on without,
    fails here."""
    import importlib.util

    def fail(error: Exception):
        raise error

    def load(name: str):
        monkeypatch.setattr("hf_memopt.recipe.prediction.one_line", fail)
        spec = importlib.util.spec_from_file_location(name, ROOT / "recipes" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.main

    return load


def slow(*values):
    """A case of a test that make test leaves to make test-slow: another one remains there."""
    return pytest.param(*values, marks=pytest.mark.slow)


def refused(*job):
    """Why memory features do not go with a job's settings; arguments as Facts.of_settings() has them."""
    from hf_memopt.levers.facts import Facts

    return Facts.of_settings(*job).feature_refusals()


def sweep(*values):
    """A case that make test-slow, too, leaves out: make test-sweeps runs it."""
    return pytest.param(*values, marks=[pytest.mark.slow, pytest.mark.sweep])


def flags(**values) -> list[str]:
    """Options of a command line: --name value, for each."""
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def run(*command, cwd=ROOT, env=None, timeout=300) -> subprocess.CompletedProcess:
    """Run a command with the test environment's programs first on the path; output is kept as text."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=_environment(env),
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def run_forked(*command, cwd=ROOT, env=None, timeout=300, stdin="") -> subprocess.CompletedProcess:
    """run() of `hf-memopt ...` or `python script ...` in a second, not ten: see forked.py."""
    import forked

    return forked.run(*command, cwd=cwd, environment=_environment(env), timeout=timeout, stdin=stdin)


def _environment(changes: dict | None) -> dict[str, str]:
    """The tests' own, with their programs first on the path."""
    environment = {**os.environ, **(changes or {})}
    environment["PATH"] = f"{BIN}{os.pathsep}{environment['PATH']}"
    return environment


def first_process(config) -> dict[str, str]:
    """The environment that `accelerate launch` and torchrun give the first of a configuration's processes. For
    run_forked() of what ends before processes meet; launch() is the real thing."""
    from unittest import mock

    from accelerate.commands.launch import launch_command, launch_command_parser

    launched: dict[str, str] = {}

    def started(args) -> None:
        count = str(args.nproc_per_node)
        torchrun = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        launched.update(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", **torchrun)

    with mock.patch("torch.distributed.run.run", started):
        launch_command(launch_command_parser().parse_args(["--config_file", str(config), "script.py"]))
    return launched


def launch(config, script, *arguments, cwd=ROOT) -> str:
    """`accelerate launch` to its end; returns what it printed. A transformers FutureWarning is a failure."""
    done = run("accelerate", "launch", "--config_file", config, "--main_process_port", 0, script, *arguments, cwd=cwd)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-6000:]
    assert not re.search(r"transformers/\S+: FutureWarning", output)
    return output
