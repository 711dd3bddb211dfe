"""Files and texts that nobody foresaw: only a result or an InputError comes of them, never another exception."""

import contextlib
import copy
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from runs import ENDED, RECOVERED, reading, report
from test_advise import LONG, log

from hf_memopt.errors import InputError, one_line
from hf_memopt.redaction import redact, redact_text
from hf_memopt.reports.advice import advise, advise_on_text
from hf_memopt.reports.next_steps import suggest_next_steps
from hf_memopt.reports.run import LOG, OOM, REPORT_FILE, read_run
from hf_memopt.reports.run_report import compare_page, figures, run_page

FEW = {"max_examples": 40, "deadline": None, "derandomize": True, "database": None}
MANY = FEW | {"max_examples": 2000}
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

# Values that were wrong somewhere once: types, signs, sizes, texts that a terminal, a page or a chart would obey.
ODD = st.sampled_from(
    [
        *(None, True, -1, 0, 1.5, 2**63, 10**400, float("nan"), float("inf"), "", "one", "[/x]", "\x1b[2J", "\ud800"),
        *("$x^$", [], [1], {}, {"a": 1}, [None], {"": None}, [[["a"]]]),
    ]
)
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _places(value, path=()):
    """The paths to all values inside."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _places(one, (*path, key))


@st.composite
def changed(draw, valid):
    """A valid content with one to three values replaced, or taken out."""
    content = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        places = [place for place in _places(content) if place]
        if not places:
            break
        *path, last = draw(st.sampled_from(places))
        parent = content
        for key in path:
            parent = parent[key]
        if draw(st.integers(0, 3)) == 0 and isinstance(parent, dict):
            del parent[last]
        else:
            parent[last] = copy.deepcopy(draw(ODD | ANY_JSON))  # a later change must not reach the strategy's own
    return content


def cut_and_flipped(content: bytes, seed: int) -> bytes:
    """Some bytes changed, inserted or lost, or the end missing."""
    chance, damaged = random.Random(seed), bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(damaged) + 1)
        damaged[at : at + chance.choice([0, 1, 1, 5])] = chance.randbytes(chance.choice([0, 1, 1, 4]))
    return bytes(damaged[: chance.randrange(len(damaged) + 1)] if chance.random() < 0.3 else damaged)


def to_json(content) -> bytes:
    return json.dumps(content).encode()


# ---- run folders


def _lines(entries) -> bytes:
    return b"".join(to_json(entry) + b"\n" for entry in entries)


READINGS = [reading(0, "eval", speed=None), reading(10), RECOVERED, reading(20)]
FULL_REPORT = report(command="recipes/sft.py", memory_arguments={"warning_threshold": 0.9}, levers={"adam_mini": True})
REPORTS = changed(FULL_REPORT).map(to_json) | ANY_JSON.map(to_json) | st.binary(max_size=60)
LOGS = (
    changed(READINGS).map(_lines)
    | st.lists(ANY_JSON, max_size=5).map(_lines)
    | st.binary(max_size=60)
    | st.builds(cut_and_flipped, st.just(_lines(READINGS)), st.integers(0, 2**32))
)
ENDS = changed(ENDED).map(to_json) | ANY_JSON.map(to_json) | st.binary(max_size=60)
# Mostly one damaged file, since the first that is refused hides what the others would do.
FOLDERS = (
    st.fixed_dictionaries({LOG: changed(READINGS).map(_lines)})
    | st.fixed_dictionaries({REPORT_FILE: changed(FULL_REPORT).map(to_json)})
    | st.fixed_dictionaries({OOM: changed(ENDED).map(to_json)})
    | st.fixed_dictionaries({}, optional={REPORT_FILE: REPORTS, LOG: LOGS, OOM: ENDS})
)


def _folder(files: dict[str, bytes], folder, drawn: bool) -> None:
    for name in (REPORT_FILE, LOG, OOM):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    with contextlib.suppress(InputError):
        run = read_run(folder)
        assert suggest_next_steps(run) and figures(run)
        if drawn:
            run_page(run).encode()
            compare_page([run, run]).encode()
    with contextlib.suppress(InputError):
        found = advise(str(folder))
        json.dumps(found.to_dict() if found else None).encode()


@pytest.mark.slow
@given(FOLDERS)
@settings(**FEW | {"max_examples": 120}, suppress_health_check=CHECKS)
def test_run_folders(tmp_path, monkeypatch, files):
    monkeypatch.setattr("hf_memopt.charts._svg", _without_drawing)
    _folder(files, tmp_path, drawn=True)


def _without_drawing(draw, width, name):
    """What a chart's function does with its values, but not matplotlib's half second of drawing them."""
    from matplotlib.figure import Figure

    draw(Figure().subplots(), width == "narrow")
    return "<svg></svg>"


@pytest.mark.slow
@pytest.mark.sweep
@given(FOLDERS)
@settings(**MANY, suppress_health_check=CHECKS)
def test_very_many_run_folders(tmp_path, monkeypatch, files):
    monkeypatch.setattr("hf_memopt.charts._svg", _without_drawing)
    _folder(files, tmp_path, drawn=True)


@pytest.mark.slow
@pytest.mark.sweep
@given(FOLDERS)
@settings(**MANY | {"max_examples": 200}, suppress_health_check=CHECKS)
def test_run_folders_with_their_charts(tmp_path, files):
    _folder(files, tmp_path, drawn=True)


# ---- texts

PIECES = st.sampled_from(
    [
        *("CUDA out of memory. ", "Tried to allocate ", "1.96 GiB", "1e9 GiB", ". GiB", "of which ", " is free", "\n"),
        *("\r", "Traceback (most recent call last)", '  File "x/optim.py", line 3, in step', "| 12/100 ["),
        *("'step': 7", "step 9:", "NCCL ", "pin_memory ", "DataLoader worker (pid 3) ", "MemoryError"),
        *("memory grows: leak", "\x1b[31m", "\ud800", "\x00", "Process 7 has ", " memory in use"),
        *("99999999999999999999", "hub_token=abc ", "https://a:b@c", '{"step": null}'),
    ]
)
TEXTS = st.text(max_size=200) | st.lists(PIECES | st.text(max_size=5), max_size=30).map("".join)


def _text(text: str) -> None:
    found = advise_on_text(text)
    json.dumps(found.to_dict() if found else None)
    assert "\x1b" not in one_line(InputError(text))
    assert redact_text(redact_text(text)) == redact_text(text)


@given(TEXTS)
@settings(**FEW | {"max_examples": 150}, suppress_health_check=CHECKS)
def test_texts(text):
    _text(text)


@pytest.mark.slow
@pytest.mark.sweep
@given(TEXTS)
@settings(**MANY | {"max_examples": 5000}, suppress_health_check=CHECKS)
def test_very_many_texts(text):
    _text(text)


@pytest.mark.slow
@given(st.sampled_from(list(LONG.values())), st.integers(0, 2**32))
@settings(**FEW | {"max_examples": 5}, suppress_health_check=CHECKS)
@pytest.mark.timeout(120)
def test_long_lines(text, seed):
    _text(cut_and_flipped(text.encode(), seed).decode("utf-8", "replace") + log("train forward"))


@given(ANY_JSON)
@settings(**FEW)
def test_whatever_json_holds_can_be_redacted(content):
    assert json.dumps(redact(redact(content))) == json.dumps(redact(content))
