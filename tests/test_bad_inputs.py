"""Every entry of bad_inputs.py ends as one line that names what is wrong, soon, and leaves no file behind."""

import functools
import os
import time

import bad_inputs
import pytest
from conftest import slow

from hf_memopt.errors import InputError, one_line

LONGEST = 20.0  # seconds: a person waits so long for an answer and no longer


@pytest.fixture
def quiet_parser(monkeypatch):
    """One parser for all entries: making it takes longer than parsing."""
    from hf_memopt.recipe import arguments

    monkeypatch.setattr(arguments, "_parser", functools.cache(arguments._parser))


@pytest.fixture
def no_progress_bars():
    import datasets

    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    yield
    if not shown:
        datasets.enable_progress_bars()


def walk(entries, tmp_path, monkeypatch) -> list[str]:
    """What is wrong with how the entries end."""
    here = tmp_path / "working folder"
    here.mkdir()
    monkeypatch.chdir(here)
    return [f"{entry.name}: {wrong}" for number, entry in enumerate(entries)
            if (wrong := _ends_badly(entry, tmp_path / str(number), here))]  # fmt: skip


def _ends_badly(entry, folder, here) -> str | None:
    folder.mkdir()
    began = time.monotonic()
    said = None
    try:
        entry.act(folder)
    except InputError as error:
        said = one_line(error)
    except BaseException as error:
        return f"{type(error).__name__}: {one_line(error)[:300]}"
    if time.monotonic() - began > LONGEST:
        return f"took {time.monotonic() - began:.0f} s"
    if left := [*os.listdir(here), *(name for name in os.listdir(folder) if name == "out")]:
        return f"left {left}"
    if entry.expected is None:
        return None
    if said is None:
        return "was accepted"
    return None if entry.expected in said and len(said) < 1000 else f"said: {said[:300]}"


@pytest.mark.parametrize(
    "maker", ["settings", "command_line", "nested", "configuration_files", "engine_files", "models"]
)
def test_settings_files_and_models(maker, tmp_path, monkeypatch, quiet_parser):
    entries = list(getattr(bad_inputs, maker)())
    wrong = walk(entries, tmp_path, monkeypatch)
    assert not wrong, f"{len(wrong)} of {len(entries)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(("maker", "every"), [("rows", 5), ("row_files", 2), slow("rows", 1), slow("row_files", 1)])
def test_rows_and_their_files(maker, every, tmp_path, monkeypatch, builtin_model, no_progress_bars):
    """In `make test` some of them, spread over all forms and formats."""
    entries = list(getattr(bad_inputs, maker)())[::every]
    wrong = walk(entries, tmp_path, monkeypatch)
    assert not wrong, f"{len(wrong)} of {len(entries)}:\n" + "\n".join(wrong)


def test_the_table_is_long():
    entries = bad_inputs.everything()
    assert len({entry.name for entry in entries}) == len(entries) >= 400
    assert sum(entry.expected is not None for entry in entries) >= 400
