"""What the core finds by entry points, and says where they are not installed."""

import importlib.metadata
import re
import shlex

import pytest
from conftest import ROOT

import hf_memopt


def test_the_core_names_no_module_of_contrib():
    """import-linter sees imports of rooms, neither those of hf_memopt/__init__.py nor names in strings."""
    package = ROOT / "hf_memopt"
    core = [file for file in package.rglob("*.py") if file.relative_to(package).parts[0] != "contrib"]
    named = re.compile(r"(?:[\"']|(?:from|import) )hf_memopt\.contrib\b")
    assert core and not [file for file in core if named.search(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(
    ("line", "group"), [("merge adapter out", "commands"), ("export rtx_4090 out --target skypilot", "export_targets")]
)
def test_what_is_not_installed_is_one_sentence(line, group, command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    code, output, errors = command(*shlex.split(line))
    expected = f"error: no entry points hf_memopt.{group} are installed: install hf_memopt again with pip\n"
    assert (code, output, errors) == (2, "", expected)
    assert command("presets", "--json")[0] == 0, "the core's commands need none"


def test_a_contributed_name(monkeypatch):
    from hf_memopt.contrib.merging.merge import merge_adapter

    assert hf_memopt.merge_adapter is merge_adapter
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    with pytest.raises(hf_memopt.InputError, match="install hf_memopt again"):
        hf_memopt.merge_adapter  # noqa: B018
