"""notebooks/: their cells, run as Colab runs them, on whatever this machine has."""

import json
import shlex
import sys
import types

import pytest
from conftest import ROOT, run, run_forked

from hf_memopt.packages import SOURCE

NOTEBOOK = ROOT / "notebooks" / "quickstart_t4.ipynb"


def _cells() -> list[dict]:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and notebook["metadata"]["accelerator"] == "GPU"
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_first_cell_installs_and_no_output_is_kept():
    first, *others = _cells()
    assert "".join(first["source"]).splitlines()[-1] == f"%pip install -q '{SOURCE}[trl]'"
    assert not any("%pip" in "".join(cell["source"]) for cell in others)
    assert not any(cell["outputs"] for cell in [first, *others])


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """Without a kernel: lines with ! are run as a shell would, and everything else by Python."""
    monkeypatch.chdir(tmp_path)
    display = types.ModuleType("IPython.display")
    shown = []
    display.HTML = lambda filename: shown.append(filename)
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    names: dict = {}

    def shell(line: str) -> None:
        words = shlex.split(line.format(**names))
        done = (run_forked if words[0] == "hf-memopt" else run)(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"

    names["_shell"] = shell
    for cell in _cells()[1:]:
        lines = "".join(cell["source"]).splitlines()
        source = "\n".join(f"_shell({line[1:]!r})" if line.startswith("!") else line for line in lines)
        exec(compile(source, str(NOTEBOOK), "exec"), names)
    assert shown == ["my-run/out/memory_report.html"]
    report = json.loads((tmp_path / "my-run" / "out" / "memory_report.json").read_text(encoding="utf-8"))
    assert report["global_step"] == 4 and report["measured"]
