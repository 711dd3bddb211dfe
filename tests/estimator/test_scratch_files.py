"""Files that a dry run's script writes: as written to the script, and gone afterwards."""

import os
import shutil
from pathlib import Path

import pytest

from hf_memopt.estimator.scripts import scratch_files as scratch


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with files, a link and a folder in it; what there is afterwards is what there was before."""
    folder = tmp_path / "work"
    (folder / "data").mkdir(parents=True)
    (folder / "a.txt").write_text("first")
    (folder / "data" / "b.txt").write_text("second")
    (folder / "link").symlink_to("a.txt")
    monkeypatch.chdir(folder)

    def content():
        files = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
        return files, sorted(folder.rglob("*")), os.stat(folder / "a.txt").st_mode, os.getcwd()

    before = content()
    yield folder
    assert content() == before


def fails(kind, function, *args, **kwargs):
    with pytest.raises(kind):
        function(*args, **kwargs)


def test_what_is_written_is_read_again(work):
    with scratch.scratch_files():
        Path("a.txt").write_text("changed")
        with open("a.txt", "a") as file:
            file.write("!")
        assert Path("a.txt").read_text() == "changed!"
        with open("data/b.txt", "r+") as file:
            assert file.read() == "second"
            file.seek(3)
            file.write("X")
        with open(work / "data" / "b.txt") as file:
            assert file.read() == "secXnd"
        with open("new.txt", "x") as file:
            file.write("new")
        fails(FileExistsError, open, "new.txt", "x")
        fails(FileNotFoundError, open, "none/new.txt", "w")
        fails(FileNotFoundError, open, "none.txt")
        os.truncate("new.txt", 1)
        descriptor = os.open("new.txt", os.O_WRONLY | os.O_APPEND)
        os.write(descriptor, b"ext"), os.close(descriptor)
        assert Path("new.txt").read_text() == "next"
        fails(FileExistsError, os.open, "a.txt", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.close(os.open("a.txt", os.O_WRONLY | os.O_TRUNC))
        assert os.stat("a.txt").st_size == 0 and os.access("new.txt", os.R_OK)
        Path("link").write_text("through")
        assert Path("a.txt").read_text() == "through"
        os.chmod("a.txt", 0o600)
        assert os.stat("a.txt").st_mode & 0o777 == 0o600
        fails(FileNotFoundError, os.chmod, "none.txt", 0o600)
        fails(FileNotFoundError, os.utime, "none.txt")


def test_what_is_removed_is_not_seen(work):
    with scratch.scratch_files():
        assert sorted(os.listdir()) == sorted(entry.name for entry in os.scandir()) == ["a.txt", "data", "link"]
        os.remove("a.txt")
        fails(FileNotFoundError, os.remove, "a.txt")
        fails(FileNotFoundError, open, "a.txt")
        fails(IsADirectoryError, os.unlink, "data")
        fails(OSError, os.rmdir, "data")
        os.unlink("data/b.txt")
        assert os.listdir("data") == []
        Path("data/c.txt").write_text("third")
        assert os.listdir("data") == ["c.txt"]
        shutil.rmtree("data")
        assert not os.path.exists("data") and not os.path.exists("data/c.txt")
        fails(FileNotFoundError, shutil.rmtree, "data")
        shutil.rmtree("data", ignore_errors=True)
        os.mkdir("data")
        fails(FileExistsError, os.mkdir, "data")
        assert os.listdir("data") == [] and os.path.isdir("data")
        os.rmdir("data")
        assert sorted(os.listdir()) == ["link"]
        Path("a.txt").write_text("again")
        with os.scandir() as entries:
            assert sorted(entry.name for entry in entries) == ["a.txt", "link"]


def test_files_and_folders_are_moved_and_linked(work):
    with scratch.scratch_files():
        os.rename("a.txt", "moved.txt")
        assert Path("moved.txt").read_text() == "first" and not os.path.exists("a.txt")
        os.replace("data/b.txt", "moved.txt")
        assert Path("moved.txt").read_text() == "second" and os.listdir("data") == []
        fails(PermissionError, os.rename, "data", "elsewhere")
        os.makedirs("mine/inner")
        Path("mine/inner/d.txt").write_text("fourth")
        os.rename("mine", "yours")
        assert Path("yours/inner/d.txt").read_text() == "fourth" and not os.path.exists("mine")
        os.symlink("yours", "other")
        assert os.path.islink("other") and os.listdir("other") == ["inner"]
        fails(FileExistsError, os.symlink, "yours", "moved.txt")
        os.link("moved.txt", "copied.txt")
        assert Path("copied.txt").read_text() == "second"
        os.chdir("yours")
        assert os.listdir() == ["inner"]


def test_folders_where_writing_is_real(work, tmp_path):
    real = tmp_path / "real"
    real.mkdir()
    with scratch.scratch_files(str(real)) as files:
        (real / "kept.txt").write_text("kept")
        (real / "gone.txt").write_text("gone")
        os.remove(real / "gone.txt")
        os.rename(real / "kept.txt", real / "there.txt")
        assert (
            files.is_real(real) and files.is_real(str(real / "x")) and files.is_real(3) and files.is_real("/dev/null")
        )
        assert not files.is_real(f"{real}x") and not files.is_real(work)
        assert os.listdir(real) == ["there.txt"] and not files.differs(real)
        fails(FileExistsError, files.create, real / "there.txt")
        shutil.copyfile("a.txt", real / "a.txt")
        (real / "below").mkdir()
        shutil.rmtree(real / "below")
    assert sorted(os.listdir(real)) == ["a.txt", "there.txt"]


def test_a_large_file_is_not_copied(work, monkeypatch):
    for largest, copied in ((5, True), (4, False)):
        monkeypatch.setattr(scratch, "_LARGEST_COPY", largest)
        with scratch.scratch_files():
            if copied:
                with open("a.txt", "a") as file:
                    file.write("!")
            else:
                fails(PermissionError, open, "a.txt", "a")
            Path("a.txt").write_text("whole")  # of which nothing is kept
