"""Which compiler there is, and whether it finds libaio: asked of the compiler itself."""

import os
import subprocess
import time

import pytest

from hf_memopt.hardware.compiler import abandoned_locks, compiler, has_libaio

HEADER = """
typedef void *io_context_t;
extern "C" int io_setup(int, io_context_t *);
"""
SOURCE = 'extern "C" int io_setup(int, void **) { return 0; }'


def test_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler() is None and not has_libaio()


def test_the_compiler_that_is_named(monkeypatch, tmp_path):
    program = tmp_path / "my-c++"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert compiler() == str(program) and not has_libaio()


@pytest.mark.needs_compiler
def test_libaio_where_the_compiler_looks_for_it(monkeypatch, tmp_path):
    """A header and a library of its name, in a folder that the compiler is pointed to."""
    (tmp_path / "libaio.h").write_text(HEADER)
    source = tmp_path / "aio.cpp"
    source.write_text(SOURCE)
    subprocess.run([compiler(), "-shared", "-fPIC", source, "-o", tmp_path / "libaio.so"], check=True)
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setenv("LIBRARY_PATH", str(tmp_path))
    assert has_libaio()
    (tmp_path / "libaio.h").write_text("#error none")
    assert not has_libaio(), "the library alone is not enough"


@pytest.mark.parametrize("variable", [True, False])
def test_a_lock_that_a_killed_compilation_left(monkeypatch, tmp_path, variable):
    """torch's own functions say where it is; one that was just taken belongs to a compilation that goes on."""
    from torch.utils.cpp_extension import _get_build_directory
    from torch.utils.file_baton import FileBaton

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if variable:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    else:
        monkeypatch.setattr("torch.utils.cpp_extension.get_default_build_root", lambda: str(tmp_path))
    lock = os.path.join(_get_build_directory("cpu_adam", False), "lock")
    assert FileBaton(lock).try_acquire()
    assert abandoned_locks() == []
    hour_ago = time.time() - 3600
    os.utime(lock, (hour_ago, hour_ago))
    assert [str(path) for path in abandoned_locks()] == [lock]
