"""How files are read and written."""

import os
import stat
from pathlib import Path

import pytest

from hf_memopt.errors import InputError
from hf_memopt.files import folder_for, read_bytes, read_json, user_path, write_folder, write_whole


@pytest.fixture
def umask():
    """Sets the umask for a test."""
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("mask", "plain", "script"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_new_files_have_the_mode_that_the_umask_leaves(mask, plain, script, umask, tmp_path):
    umask(mask)
    write_folder(tmp_path / "new", {"a.json": "{}", "a.sh": "#!/bin/sh"})
    assert mode(tmp_path / "new" / "a.json") == plain
    assert mode(tmp_path / "new" / "a.sh") == script


@pytest.mark.parametrize("kept", [0o600, 0o640, 0o664])
def test_a_replaced_file_keeps_its_mode(kept, umask, tmp_path):
    file = tmp_path / "a.json"
    file.write_text("old")
    file.chmod(kept)
    write_whole(file, "new")
    assert file.read_text() == "new" and mode(file) == kept


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "taken", "text")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]


@pytest.mark.timeout(60)
def test_what_is_no_regular_file_is_refused(tmp_path):
    """A pipe that nobody writes into would be waited for, a device read without end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match="give a file"):
            read_bytes(path, 100)
    with pytest.raises(InputError, match="no such file"):
        read_bytes(tmp_path / "none", 100)


def test_json_that_cannot_be_used_is_one_line(tmp_path, subtests):
    deep = b'{"a":' * 100 + b"1" + b"}" * 100
    for content in (b"", b"{", b"\xff", b"[1]", b'{"a": ' * 5000, deep, b'{"a": ' + b"1" * 5000):
        with subtests.test(content=str(content)):
            (tmp_path / "a.json").write_bytes(content)
            with pytest.raises(InputError, match=r"a\.json") as refused:
                read_json(tmp_path / "a.json")
            assert "\n" not in str(refused.value)


def test_folders_to_write_to(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(InputError, match="is a file, not a folder"):
            folder_for(tmp_path / place)
    assert folder_for(tmp_path / "new" / "newer") == tmp_path / "new" / "newer"


def test_the_home_of_nobody():
    with pytest.raises(InputError, match="write the whole path"):
        user_path("~nobody-of-this-name/x")


def test_a_file_of_as_many_bytes_as_are_read_is_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_bytes(path, 5) == read_bytes(path, 6) == b"12345" and read_bytes(path, 3, tail=True) == b"345"
    with pytest.raises(InputError, match="has 5 bytes, and at most 4 are read"):
        read_bytes(path, 4)
