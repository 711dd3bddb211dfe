"""What a dry run's script cannot do: whatever it tries, nothing changes, nothing is sent, and nothing outlives it."""

import contextlib
import http.server
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from conftest import ROOT

from hf_memopt.cli.estimate import DryRunOptions, _dry_run
from hf_memopt.confined import hub as hub_access
from hf_memopt.confined import rights
from hf_memopt.confined.hub import serve
from hf_memopt.confined.process import run_confined
from hf_memopt.hardware import detection, get_hardware

# peft (0.21.2) and trl (1.16) use the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`.*gradient_checkpointing.*` is deprecated:FutureWarning")
SCRIPT = Path(__file__).parents[1] / "dry_run_effects.py"
SHARED_MEMORY, SYSTEM_V_KEY = "hf-memopt-test", 0x5EC2E7  # what it tries to create in memory
# Redirected by scratch_files, or seen as done and not done; tried by threads and programs; all else is denied.
DONE = {
    *("open", "append", "touch", "makedirs", "remove", "rmtree", "move", "copy", "hard link", "through a link"),
    "truncate",
}
DONE |= {"mmap", "archives", "numpy.save", "numpy.memmap", "chmod", "fchmod", "chown", "utimes", "futimens"}
DONE |= {"in the background", "at exit", "left behind", "without a name"}

_reason = rights.cannot_confine() if sys.platform == "linux" else "what is tried is Linux's"
needs_confinement = pytest.mark.skipif(_reason is not None, reason=str(_reason))


def snapshot(*folders) -> dict:
    """All that a change could change; times of access are not."""
    paths = [path for folder in folders for path in (Path(folder), *sorted(Path(folder).rglob("*")))]
    return {path: _state(path) for path in paths}


def _state(path: Path) -> tuple:
    status = path.lstat()
    names = os.listxattr(path, follow_symlinks=False)
    return (
        *(status.st_mode, status.st_uid, status.st_gid, status.st_nlink, status.st_size, status.st_mtime_ns),
        {name: os.getxattr(path, name, follow_symlinks=False) for name in names},
        path.read_bytes() if path.is_file() else None,
    )


def left_in_memory() -> list[str]:
    """What the script tried to leave there: all there is would be other processes' too, gigabytes that change."""
    files = [f"/dev/shm/{SHARED_MEMORY}"] if os.path.exists(f"/dev/shm/{SHARED_MEMORY}") else []
    tables = [Path("/proc/sysvipc", kind).read_text().splitlines() for kind in ("shm", "msg", "sem")]
    return files + [line for table in tables for line in table[1:] if int(line.split()[0]) == SYSTEM_V_KEY]


def confined_dry_run(script: Path, *arguments: str) -> tuple[int, str, dict]:
    """A dry run's exit code, what it prints, and the files of its folder when it has ended."""
    printed = []

    def child(hub) -> int:
        sys.stdout = sys.stderr = Path(tempfile.gettempdir(), "log").open("w")  # noqa: SIM115
        options = DryRunOptions(script=str(script), arguments=list(arguments), hardware="cpu")
        return _dry_run(options, None, True, hub)

    code = run_confined(child, serve, lambda folder: printed.append(Path(folder, "tmp", "log").read_text()))
    return code, printed[0]


class Watched:
    """What an effect would reach, with what has reached it."""

    def __init__(self, folder: Path) -> None:
        self.received = []
        self.sockets = [socket.create_server(("", 0))]
        self.unix, self.abstract = str(folder / "socket"), f"\0hf-memopt-{os.getpid()}"
        for family, address in (("AF_INET", ("", 0)), ("AF_UNIX", self.unix), ("AF_UNIX", self.abstract)):
            self.sockets.append(socket.socket(getattr(socket, family), socket.SOCK_DGRAM))
            self.sockets[-1].bind(address)
        self.process = subprocess.Popen(["sleep", "600"])
        self.file = (folder / "inherited").open("w")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for end in (*self.sockets, self.file):
            end.close()

    def argument(self) -> str:
        tcp, udp, *_ = (end.getsockname()[1] for end in self.sockets[:2])
        return json.dumps(
            {"tcp": tcp, "udp": udp, "unix": self.unix, "abstract": self.abstract}
            | {"process": self.process.pid, "descriptor": self.file.fileno()}
        )

    def anything(self) -> bool:
        for end in self.sockets:
            end.setblocking(False)
            try:
                end.accept() if end.type == socket.SOCK_STREAM else end.recv(100)
            except BlockingIOError:
                continue
            return True
        return self.process.poll() is not None


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A folder of files, and what else could be changed or reached; its server is the hub."""
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    for name in ("keep", "keep2", "keep3", "sub/keep"):
        (folder / name).write_text("kept")
        os.utime(folder / name, (10**9, 10**9))
    with contextlib.suppress(OSError):  # not every file system has them
        os.setxattr(folder / "keep", "user.old", b"1")
    watched = Watched(tmp_path)
    yield folder, watched
    watched.close()


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Once, and not in every child."""
    import datasets  # noqa: F401
    import pyarrow.feather  # noqa: F401

    from hf_memopt.estimator.scripts import dry_run

    dry_run._import_before()


@needs_confinement
@pytest.mark.parametrize("abi", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_changes_and_nothing_is_sent(abi, watched, monkeypatch):
    """Also where the kernel's Landlock is the first one, and the filter of system calls has more to do."""
    folder, reached = watched
    from huggingface_hub import constants

    if abi is not None:
        monkeypatch.setattr(rights, "landlock_abi", lambda: abi)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{json.loads(reached.argument())['tcp']}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    before = snapshot(folder, folder.parent / "inherited")
    code, printed = confined_dry_run(SCRIPT, str(folder), reached.argument())
    assert code == 0, printed
    assert json.loads(printed[printed.index("{") :])["fits"]
    outcomes = dict(line.split("\t") for line in printed.splitlines() if "\t" in line)
    assert len(outcomes) > 70
    # Python without gdbm keeps shelves with its own open().
    assert {name for name, outcome in outcomes.items() if outcome == "done"} - {"shelve"} == DONE
    assert not reached.anything()
    assert snapshot(folder, folder.parent / "inherited") == before
    assert not left_in_memory()
    assert not left_of(str(folder))


def left_of(text: str) -> list[psutil.Process]:
    """Processes whose command has a text in it."""
    return [process for process in psutil.process_iter(["cmdline"]) if text in " ".join(process.info["cmdline"] or ())]


def wait_until(condition) -> bool:
    end = time.monotonic() + 20
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.05)
    return bool(met)


@needs_confinement
def test_nothing_outlives_a_killed_parent(tmp_path):
    """Neither the script, nor what it started, nor its temporary folder."""
    (tmp_path / "train.py").write_text(
        f"""import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sh", "-c", "trap '' TERM HUP; while :; do sleep 1; done # {tmp_path}"])
if os.fork():
    open(os.path.join(os.environ["TMPDIR"], "started"), "w").close()
time.sleep(600)
"""
    )
    program = (
        "import runpy, tempfile; from hf_memopt.confined.process import run_confined; "
        f"tempfile.tempdir = {str(tmp_path)!r}; "
        f"run_confined(lambda hub: runpy.run_path({str(tmp_path / 'train.py')!r}), lambda hub, folder: hub.poll(None))"
    )
    parent = psutil.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL)
    assert wait_until(lambda: any(tmp_path.rglob("started")))
    family = parent.children(recursive=True)
    assert len(family) >= 4 and left_of(f"# {tmp_path}")
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(_runs(child) for child in family))
    assert not left_of(f"# {tmp_path}")
    assert wait_until(lambda: [path.name for path in tmp_path.iterdir()] == ["train.py"])


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="traces are forked on Linux")
def test_forked_traces_end_with_a_killed_parent(tmp_path):
    program = (
        "import sys, time; from hf_memopt.estimator.tracing import parallel\n"
        "parallel._cores, parallel._warm = lambda: 3, True\n"
        "def work(item):\n    open(f'{sys.argv[1]}/{item}', 'w').close()\n    time.sleep(600)\n"
        "parallel.on_all_cores(work, [1, 2, 3])"
    )
    parent = psutil.Popen([sys.executable, "-c", program, tmp_path])
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == 3)
    forks = parent.children()
    parent.kill()
    parent.wait()
    assert len(forks) == 2 and wait_until(lambda: not any(_runs(fork) for fork in forks))


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@needs_confinement
def test_a_script_that_is_killed_is_no_verdict(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("import os\nos.kill(os.getpid(), 9)")
    assert confined_dry_run_code(tmp_path / "train.py") == 128 + 9


def confined_dry_run_code(script: Path) -> int:
    options = DryRunOptions(script=str(script), hardware="cpu")
    return run_confined(lambda hub: _dry_run(options, None, True, hub), serve)


class Hub(http.server.BaseHTTPRequestHandler):
    """One file of one repository, as the hub serves it."""

    def do_HEAD(self):
        self.server.requests.append(f"{self.command} {self.path}")
        there = self.path == "/some/model/resolve/main/config.json"
        self.send_response(200 if there else 404)
        if not there:
            self.send_header("X-Error-Code", "EntryNotFound")
        for name, value in (("X-Repo-Commit", "c" * 40), ("ETag", '"e"'), ("Content-Length", "2" if there else "0")):
            self.send_header(name, value)
        self.end_headers()
        return there

    def do_GET(self):
        if self.do_HEAD():
            self.wfile.write(b"{}")

    do_POST = do_HEAD

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.requests = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield server
    server.shutdown()
    server.server_close()


@needs_confinement
def test_what_the_hub_has_is_read_through_the_parent(hub, tmp_path):
    (tmp_path / "train.py").write_text(
        """from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.utils import get_session
from huggingface_hub import constants
from huggingface_hub.utils._runtime import is_xet_available
assert not is_xet_available()
print("read", open(hf_hub_download("some/model", "config.json")).read())
for method in ("post", "put", "delete"):
    try:
        getattr(get_session(), method)(constants.ENDPOINT + "/api/models/some/model")
    except Exception as error:
        print("refused", error)
open(hf_hub_download("some/model", "config.json"), "w").write("changed")
hf_hub_download("some/model", "missing.json")
"""
    )
    code, printed = confined_dry_run(tmp_path / "train.py")
    assert code == 2 and "read {}" in printed and printed.count("refused a dry run only reads") == 3
    assert "Logging error" not in printed
    assert "train.py, line 13: RemoteEntryNotFoundError" in printed
    assert {request.split()[0] for request in hub.requests} <= {"GET", "HEAD"}
    kept = tmp_path / "cache" / "models--some--model" / "snapshots" / ("c" * 40) / "config.json"
    assert kept.read_text() == "{}"


def test_an_address_names_no_place_outside_the_cache(monkeypatch):
    import huggingface_hub

    asked = []
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *names, **fields: asked.append((names, fields)))
    for revision in ("..%2F..%2Fx", "%2E%2E/x"):
        hub_access._in_cache(f"https://huggingface.co/a/b/resolve/{revision}/config.json", {})
    assert asked == []
    hub_access._in_cache("https://huggingface.co/datasets/a/b/resolve/refs%2Fpr%2F1/data/x%20y.json", {})
    fields = {"repo_type": "dataset", "revision": "refs/pr/1", "token": False}
    assert asked == [(("a/b", "data/x y.json"), fields)]


# ---- ordinary scripts

ORDINARY = ["run_clm", "run_glue", "run_ner", "run_qa", "run_summarization", "run_image_classification"]
ORDINARY += [
    *("peft_lora_classification", "sentence_transformer", "stream_clm", "trl_sft", "trl_dpo_lora", "weighted_loss"),
]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """tests/scripts' models and data, made by a process that may import what it likes."""
    folder = tmp_path_factory.mktemp("inputs")
    subprocess.run([sys.executable, ROOT / "tests" / "script_inputs.py", folder], check=True, capture_output=True)
    return folder


@needs_confinement
@pytest.mark.slow
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_scripts_get_to_train(name, inputs, monkeypatch):
    """With the estimate that is recorded of them."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import estimator_scripts

    script = ROOT / "tests" / "scripts" / f"{name}.py"
    if package := estimator_scripts.missing(script):
        pytest.skip(f"needs {package}")
    recorded = json.loads((ROOT / "benchmarks" / "results" / "estimator_scripts.json").read_text())
    (expected,) = [row["predicted_bytes"] for row in recorded["rows"] if row["script"] == name]
    monkeypatch.chdir(inputs)
    before = snapshot(inputs)
    code, printed = confined_dry_run(script, *estimator_scripts.argv(script))
    assert code == 0, printed
    found = json.loads(printed[("\n" + printed).rindex("\n{\n") :])  # behind warnings, where there are any
    assert found["peak_allocated_bytes"] == pytest.approx(expected, rel=0.01)
    assert snapshot(inputs) == before


@needs_confinement
def test_a_card_is_asked_by_a_process_that_can(monkeypatch, capfd, tmp_path):
    """Not by the confined one, in which a driver may not start."""
    from hf_memopt.cli import estimate

    card, script = get_hardware("rtx_4090"), tmp_path / "train.py"
    script.write_text("import torch, sys\nsys.exit(torch.cuda.get_device_name())")
    monkeypatch.setattr(estimate, "may_have_card", lambda: True)
    monkeypatch.setattr(detection, "detect", lambda: card)

    def on_own_stderr(*arguments) -> int:
        with os.fdopen(2, "w", closefd=False) as sys.stderr:
            return _dry_run(*arguments)

    monkeypatch.setattr(estimate, "_dry_run", on_own_stderr)
    assert estimate._confined(DryRunOptions(script=str(script)), None, False) == 2
    assert "train.py ended with “NVIDIA GeForce RTX 4090”" in capfd.readouterr().err


# ---- where a system cannot


@pytest.fixture
def no_landlock(monkeypatch):
    def answer(*arguments):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(rights, "_syscall", answer)
    monkeypatch.setattr(sys, "platform", "linux")


def test_without_landlock_a_script_runs_only_when_asked(no_landlock, command, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)  # how dry-run ends
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('ran')")
    code, _, errors = command("dry-run", "train.py", "--hardware", "cpu")
    assert code == 2 and errors.count("\n") == 1
    assert "this kernel or container does not offer Landlock" in errors and "--allow-unconfined" in errors
    code, _, errors = command("dry-run", "train.py", "--hardware", "cpu", "--allow-unconfined")
    first, *rest = errors.splitlines()
    assert first.startswith("not confined, as this kernel") and "train.py can change files and send" in first
    assert code == 2 and "ran" in rest and "ended without calling train()" in rest[-1]


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [("win32", "AMD64", "offers nothing"), ("linux", "riscv64", "x86_64 and aarch64"), ("darwin", "arm64", None)],
)
def test_systems(system, machine, reason, monkeypatch):
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    said = rights.cannot_confine()
    assert (said is None) if reason is None else (reason in said)


def _verdict(steps: list, machine: int, number: int, arguments: tuple[int, ...]) -> int:
    """What a filter of system calls returns, by its five operations: 0x7FFF0000 allows, 0x50000 | N fails with N."""
    value, place = None, 0
    while True:
        kind, yes, no, constant = steps[place]
        place += 1
        if kind == 0x06:
            return constant
        if kind == 0x20:
            value = {0: number, 4: machine}[constant] if constant < 16 else arguments[(constant - 16) // 8]
        elif kind == 0x54:
            value &= constant
        else:
            place += yes if {0x15: value == constant, 0x35: value >= constant}[kind] else no


_ALLOWED, _NOT_PERMITTED, _SEEMS_DONE, _NO_SUCH_CONTROL = 0x7FFF0000, 0x50001, 0x50000, 0x50019
_ME = os.getpid()


CALLS = [
    ("read", (0, 63), (), _ALLOWED, _ALLOWED),
    ("x32's read", (0x40000000, 0x40000000), (), _NOT_PERMITTED, _NOT_PERMITTED),
    ("fchmod", (91, 52), (), _SEEMS_DONE, _SEEMS_DONE),
    ("mount", (165, 40), (), _NOT_PERMITTED, _NOT_PERMITTED),
    ("a pair of streams", (53, 199), (1, 1), _ALLOWED, _ALLOWED),
    ("a pair of streams, closed on exec", (53, 199), (1, 0o2000001), _ALLOWED, _ALLOWED),
    ("a pair of datagrams", (53, 199), (1, 2), _NOT_PERMITTED, _NOT_PERMITTED),
    ("a pair elsewhere", (53, 199), (2, 1), _NOT_PERMITTED, _NOT_PERMITTED),
    ("ioctl TCGETS", (16, 29), (0, 0x5401), _ALLOWED, _ALLOWED),
    ("ioctl TIOCSTI", (16, 29), (0, 0x5412), _NOT_PERMITTED, _NOT_PERMITTED),
    ("ioctl TIOCLINUX", (16, 29), (0, 0x541C), _NOT_PERMITTED, _NOT_PERMITTED),
    ("ioctl FS_IOC_SETFLAGS", (16, 29), (0, 0x40086602), _NO_SUCH_CONTROL, _NO_SUCH_CONTROL),
    ("ioctl of btrfs", (16, 29), (0, 0x50009401), _NO_SUCH_CONTROL, _NO_SUCH_CONTROL),
    ("prlimit64 of itself", (302, 261), (0,), _ALLOWED, _ALLOWED),
    ("prlimit64 of another", (302, 261), (1,), _NOT_PERMITTED, _NOT_PERMITTED),
    ("kill of itself", (62, 129), (_ME,), _ALLOWED, _ALLOWED),
    ("kill of its group", (62, 129), (2**32 - _ME,), _ALLOWED, _ALLOWED),
    ("kill of another", (62, 129), (_ME + 1,), _NOT_PERMITTED, _ALLOWED),
    ("tgkill of its group", (234, 131), (2**32 - _ME,), _NOT_PERMITTED, _ALLOWED),
    ("tkill", (200, 130), (), _NOT_PERMITTED, _ALLOWED),
    ("truncate", (76, 45), (), _NOT_PERMITTED, _ALLOWED),
    ("openat", (257, 56), (0, 0, os.O_RDONLY), _ALLOWED, _ALLOWED),
    ("openat and truncate", (257, 56), (0, 0, os.O_TRUNC), _NOT_PERMITTED, _ALLOWED),
    ("openat to write, which needs a right", (257, 56), (0, 0, os.O_TRUNC | os.O_WRONLY), _ALLOWED, _ALLOWED),
]


def test_the_filter_decides_on_each_call(monkeypatch, subtests):
    for call, numbers, arguments, on_old_kernels, verdict in CALLS:
        with subtests.test(f"{call} {numbers} {arguments} {on_old_kernels} {verdict}"):
            for machine, own, number in zip(("x86_64", "aarch64"), (0xC000003E, 0xC00000B7), numbers, strict=True):
                monkeypatch.setattr("platform.machine", lambda name=machine: name)
                for abi, expected in ((1, on_old_kernels), (2, on_old_kernels), (6, verdict), (7, verdict)):
                    steps = list(struct.iter_unpack("HBBI", rights._filter(abi)))
                    assert _verdict(steps, own, number, arguments) == expected, (machine, abi)
                    assert _verdict(steps, 0x40000003, number, arguments) == _NOT_PERMITTED, "a 32-bit program's"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
@pytest.mark.parametrize("abi", [1, 7])
def test_every_jump_of_the_filter_ends_within_it(machine, abi, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    steps = list(struct.iter_unpack("HBBI", rights._filter(abi)))
    assert len(steps) < 4096 and steps[-1] == (0x06, 0, 0, 0x7FFF0000)
    for place, (kind, yes, no, _) in enumerate(steps):
        assert kind not in (0x15, 0x35) or place + 1 + max(yes, no) < len(steps)


def test_the_profile_of_macos_writes_in_one_folder(tmp_path):
    profile = rights.macos_profile(str(tmp_path))
    assert profile.index("(deny file-write*)") < profile.index(f'(subpath "{tmp_path}")')
    assert "(deny network*)" in profile and profile.count("(") == profile.count(")")
    with pytest.raises(ValueError, match="cannot name"):
        rights.macos_profile('/tmp/"quoted')
