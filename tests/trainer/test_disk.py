"""Full and read-only disks, and two runs in one folder."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from small_runs import train

from hf_memopt.disk import claim, claimed, release, write_failure
from hf_memopt.errors import InputError
from hf_memopt.monitor import callback
from hf_memopt.trainer.checkpoints.intact import newest_intact

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@contextlib.contextmanager
def largest_file(size: int):
    """The system takes no file of more bytes, as a full disk takes none: it writes a part, and then refuses."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


# Of the small model's files: the weights by safetensors (52 KB), and the optimizer's states by torch.save (115 KB).
@pytest.mark.parametrize("size", [20_000, 80_000], ids=["weights", "optimizer"])
def test_a_disk_that_fills_up_ends_in_one_sentence_and_the_checkpoint_before_it_is_intact(size, tmp_path):
    def fills_up(trainer):
        save = trainer._save_atomically

        def limited(*args):
            with largest_file(size) if trainer.state.global_step == 4 else contextlib.nullcontext():
                save(*args)

        trainer._save_atomically = limited

    with pytest.raises(
        InputError, match=r"no checkpoint can be written to .*\. Make room .* resumes from checkpoint-2"
    ):
        train(tmp_path, prepare=fills_up, **SAVING)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["checkpoint-2"]
    assert newest_intact(tmp_path) == tmp_path / "checkpoint-2"
    resumed = train(tmp_path, resume=True, **SAVING)
    assert resumed.step == 4


def test_before_the_first_checkpoint_there_is_nothing_to_resume_from(tmp_path):
    def full(trainer):
        save = trainer._save_atomically

        def limited(*args):
            with largest_file(20_000):
                save(*args)

        trainer._save_atomically = limited

    with pytest.raises(InputError, match=r"probe_save: no checkpoint can be written .*there is no checkpoint yet"):
        train(tmp_path, prepare=full, memory={"probe_save": True}, **SAVING)


def test_a_log_that_cannot_be_written_costs_no_step(tmp_path, caplog):
    (tmp_path / callback.LOG_FILE).symlink_to("/dev/full")
    assert train(tmp_path, logging_strategy="steps", logging_steps=1, max_steps=3).step == 3
    assert caplog.text.count("memory_log.jsonl (No space left on device)") == 1


@pytest.mark.slow
def test_an_end_is_explained_on_a_full_disk(tmp_path, caplog):
    import torch

    from hf_memopt import TrainingOutOfMemory

    def always(trainer):
        def fail(*args, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        trainer.model.forward = fail
        (tmp_path / "oom_report.json").mkdir()

    with pytest.raises(TrainingOutOfMemory):
        train(tmp_path, prepare=always, max_steps=3)
    assert "oom_report.json cannot be written" in caplog.text


def _what_a_disk_refuses_is_told_from_other_errors(error, reason):
    found = write_failure(error)
    assert found is None if reason is None else found.startswith(reason)
    wrapped = RuntimeError("saving failed")
    wrapped.__cause__ = error
    assert write_failure(wrapped) == found
    wrapped.__cause__, wrapped.__context__ = None, error  # it was handled, and then something else failed
    assert write_failure(wrapped) is None


def test_what_a_disk_refuses_is_told_from_other_errors(subtests):
    for error, reason in [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (OSError(errno.ENOENT, "No such file or directory"), None),
        (RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"), "the disk did not take"),
        (ValueError("a batch of 3 samples"), None),
        (PermissionError(errno.EACCES, "Permission denied"), None),  # of a process or a socket
        (PermissionError(errno.EACCES, "Permission denied", "/a/file"), "Permission denied: /a/file"),
        (RuntimeError("Error building extension: Permission denied"), None),
    ]:
        with subtests.test(error=str(error), reason=str(reason)):
            _what_a_disk_refuses_is_told_from_other_errors(error, reason)


# ---- the folder


def _no_folder(tmp_path: Path) -> str:
    (tmp_path / "file").write_text("")
    return str(tmp_path / "file")


PLACES = {
    "a file": _no_folder,
    "below a file": lambda path: _no_folder(path) + "/out",
    "empty": lambda path: " ",
    "no file system": lambda path: "/proc/hf_memopt",
    "full": lambda path: "/dev/full/out",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_that_cannot_be_written_to_is_refused(place, tmp_path):
    with pytest.raises(InputError, match=r"output_dir.* (cannot be written to|is empty).*name a"):
        claim(PLACES[place](tmp_path))


def test_a_recipe_says_so_before_it_loads_anything(recipe, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("too late"))
    with pytest.raises(InputError, match=r"output_dir=.*cannot be written to"):
        recipe("sft")(["--preset", "cpu", "--output_dir", _no_folder(tmp_path)])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="Permission denied"):
        claim(tmp_path)


HOLDS = """
import sys, time
sys.path.insert(0, sys.argv[2])
from hf_memopt.disk import claim
claim(sys.argv[1])
print("claimed", flush=True)
time.sleep(600)
"""


def test_a_second_run_in_the_folder_is_refused_until_the_first_has_ended(tmp_path):
    first = subprocess.Popen([sys.executable, "-c", HOLDS, tmp_path, ROOT], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "claimed\n"
        with pytest.raises(InputError, match=rf"is in use by process {first.pid} on .*: wait until .*another folder"):
            train(tmp_path, max_steps=1)
        assert not list(tmp_path.glob("checkpoint-*"))
    finally:
        first.kill()  # which cleans nothing up
        first.wait()
    assert train(tmp_path, max_steps=1).step == 1
    assert not (tmp_path / ".lock").exists()


def test_a_fork_does_not_let_the_folder_go(tmp_path):
    """Data loading workers are forked, and end."""
    with claimed(tmp_path):
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        done = subprocess.run(
            [sys.executable, "-c", HOLDS, tmp_path, ROOT], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1 and f"is in use by process {os.getpid()}" in done.stderr
        assert claim(tmp_path) is False
    assert claim(tmp_path) is True
    release(tmp_path)


def test_locks_that_a_disk_does_not_have_are_done_without(tmp_path, monkeypatch):
    import fcntl

    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    with claimed(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
