"""Snapshots that nobody vouches for: nothing runs, one line says what is wrong, and reading costs little."""

import gzip
import json
import os
import pickle
import sys

import pytest
from test_snapshot import _pickled, cuda_snapshot

from hf_memopt import InputError
from hf_memopt.contrib.snapshots.snapshot_analysis import analyze_snapshot
from hf_memopt.contrib.snapshots.snapshot_file import _lower_limit

# ---- files that nobody vouches for


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.drawn(6)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_malicious_pickle_runs_nothing(protocol, packed, tmp_path, command):
    done = tmp_path / "done"
    content = pickle.dumps({"device_traces": [Malicious(done)]}, protocol)
    pickle.loads(content)  # it does harm where it is trusted
    assert done.exists()
    done.unlink()
    file = _pickled(tmp_path, gzip.compress(content) if packed else content)
    code, output, errors = command("snapshot", file)
    assert code == 2 and not output and len(errors.splitlines()) == 1
    assert "system" in errors and "could run code" in errors
    assert not done.exists()


@pytest.mark.drawn(6)
@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x80", b"not a pickle", b"{", b"[1]", b"\x1f\x8bbroken", pickle.dumps([1]), pickle.dumps({})),
        *(b"(cos\nsystem\n", b"\x80\x04\x8c\x02os\x8c\x06system\x93.", b"\x80\x02\x82\x01.", b"Pabc\n."),
        *(b"(" * 100_000, pickle.dumps({"device_traces": [[{"action": "alloc"}]]})),
        *(pickle.dumps({"device_traces": [[]]}), pickle.dumps({"device_traces": [3]})),
        pickle.dumps({"device_traces": []}),
        b'{"device_traces": [[{"action": "alloc", "addr": 1, "size": 1, "stack": 4}]], "stacks": []}',
    ],
)
def test_what_is_no_snapshot_is_one_line(content, tmp_path, command):
    code, output, errors = command("snapshot", _pickled(tmp_path, content))
    assert (code, output) == (2, "") and len(errors.splitlines()) == 1 and "Traceback" not in errors


def _changed(**event) -> bytes:
    """CUDA's snapshot with another first event."""
    content = cuda_snapshot()
    content["device_traces"][0][0] |= event
    return pickle.dumps(content)


def _ours(**about) -> bytes:
    """CUDA's snapshot with what SnapshotCallback adds."""
    return pickle.dumps(cuda_snapshot(hf_memopt=about))


BAD_VALUES = {
    "size text": _changed(size="big"),
    "size negative": _changed(size=-1),
    "size nan": _changed(size=float("nan")),
    "size huge": _changed(size=10**400),
    "size bool": _changed(size=True),
    "address": _changed(addr=None),
    "time": _changed(time_us="now"),
    "time nan": _changed(time_us=float("nan")),
    "frames": _changed(frames=[3]),
    "frames text": _changed(frames="abc"),
    "line": _changed(frames=[{"line": "7"}]),
    "action": _changed(action=[]),
    "marks": _ours(marks=[(1, 2)]),
    "mark's time": _ours(marks=[("a", "step", "2")]),
    "owners": _ours(owners=[3]),
    "owner's kind": _ours(owners=[[1, 1000, 1000, "of another version", "a"]]),
    "capacity": _ours(capacity="much"),
    "segments": pickle.dumps(cuda_snapshot() | {"segments": [{"device": 0}]}),
    "blocks": pickle.dumps(cuda_snapshot() | {"segments": [{"address": 0, "total_size": 1, "blocks": [{}]}]}),
    "about": pickle.dumps(cuda_snapshot(hf_memopt=[1])),
    "stacks": pickle.dumps(cuda_snapshot(stacks=3)),
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("content", BAD_VALUES.values(), ids=BAD_VALUES)
def test_values_of_another_type_are_one_line(content, tmp_path, command):
    code, output, errors = command("snapshot", _pickled(tmp_path, content))
    if code:  # unknown actions and missing frames are passed over
        assert (code, output) == (2, "") and len(errors.splitlines()) == 1 and "the snapshot is damaged" in errors


@pytest.mark.parametrize("path", ["/dev/zero", "pipe", "."])
@pytest.mark.timeout(60)
def test_what_is_no_file_is_not_waited_for(path, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    code, output, errors = command("snapshot", path)
    assert (code, output) == (2, "") and "give a file" in errors


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit a process's memory")
@pytest.mark.parametrize("index", [b"\xff\xff\xff\x7f", b"\xff\xff\xff\x1f"])
def test_a_few_bytes_do_not_take_all_memory(index, tmp_path):
    """A memo of two billion and of half a billion places, which the unpickler would make first."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(InputError, match="is not a memory snapshot"):
        analyze_snapshot(_pickled(tmp_path, b"\x80\x02]r" + index + b"."))
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_what_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_memopt.contrib.snapshots.snapshot_file.LARGEST", 10_000)
    with pytest.raises(InputError, match="decompresses to more than"):
        analyze_snapshot(_pickled(tmp_path, gzip.compress(b"{" + b" " * 20_000)))
    with pytest.raises(InputError, match="at most 10,000 are read"):
        analyze_snapshot(_pickled(tmp_path, b"{" + b" " * 20_000))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_shared_stacks_and_owners_cost_no_squares(tmp_path):
    """A small file can say that 20,000 allocations of one address have 20,000 owners, and share one long stack."""
    stack = [{"filename": f"/x/a{number}.py", "name": "f", "line": 1} for number in range(5000)]
    trace = []
    for number in range(20_000):
        trace.append({"action": "alloc", "addr": 64, "size": 8, "time_us": 2 * number, "stack": 0})
        trace.append({"action": "free_completed", "addr": 64, "size": 8, "time_us": 2 * number + 1})
    owners = [[2 * number, 64, 8, "gradients", str(number)] for number in range(20_000)]
    marks = [[number, "step", str(number)] for number in range(20_000)]
    content = {
        "segments": [],
        "device_traces": [trace],
        "stacks": [stack],
        "hf_memopt": {"owners": owners, "marks": marks},
    }
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content))
    found = analyze_snapshot(file)
    assert found.peak_bytes == 8 and found.by_kind["gradients"] == 8 and len(found.growth) < 100


@pytest.mark.slow
def test_names_are_shown_as_they_are(tmp_path, command):
    """Neither rich's markup, nor a terminal's, nor a page's."""
    frames = [{"filename": "/x/[/y].py", "name": "\x1b[31m<b>$x^$", "line": 1}]
    file = _pickled(tmp_path, cuda_snapshot(hf_memopt={"reason": "[/x] \x1b[2J", "marks": [], "owners": []}))
    content = pickle.loads(file.read_bytes())
    content["device_traces"][0][0] |= {"frames": frames, "user_metadata": "[/x]"}
    file.write_bytes(pickle.dumps(content))
    for name in ("a.html", "a $x^$.png"):
        code, output, errors = command("snapshot", file, "--plot", tmp_path / name)
        assert code == 0 and not errors and "\x1b" not in output


@pytest.mark.parametrize(("soft", "lowered"), [(-1, True), (2**31, True), (2**20, False)])
def test_a_process_without_a_limit_gets_one(soft, lowered, monkeypatch):
    resource = pytest.importorskip("resource")
    asked = []
    monkeypatch.setattr(resource, "RLIM_INFINITY", -1)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, -1))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    assert _lower_limit(2**30) == ((soft, -1) if lowered else None)
    assert asked == [(2**30, -1)] * lowered
