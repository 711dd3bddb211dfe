"""Which compiler there is, and whether it finds libaio: asked of the compiler itself."""

import subprocess

import pytest

from hf_memopt.hardware.compiler import compiler, has_libaio

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
