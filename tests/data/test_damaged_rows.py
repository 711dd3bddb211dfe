"""Wherever a file of rows is damaged, the error names that line."""

import json
import re

import pytest

from hf_memopt.data.row_files import numbered_rows
from hf_memopt.errors import InputError

ROWS = [{"text": "a"}, {"text": "b, c", "n": [1, {"x": None}]}, {"text": "d"}, {"text": "é"}]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


def _named(path, text):
    """The line that the error names; None where all is read."""
    path.write_text(text, encoding="utf-8", newline="")
    try:
        list(numbered_rows(path))
    except InputError as error:
        return int(re.match(rf"{re.escape(str(path))}: line (\d+) ", str(error))[1])
    return None


@pytest.mark.parametrize("end", ["\n", "\r\n", ""], ids=["lf", "crlf", "no end"])
@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_line_that_is_cut_off(ending, end, tmp_path):
    newline = end or "\n"
    for row, line in enumerate(LINES):
        for length in range(1, len(line)):
            cut = [*LINES[:row], line[:length], *LINES[row + 1 :]]
            assert _named(tmp_path / f"a{ending}", newline.join(cut) + end) == row + 1, line[:length]


@pytest.mark.parametrize("damage", ["}", ",", "x", '"', "{"])
def test_a_line_with_something_in_it(damage, tmp_path):
    for row, line in enumerate(LINES):
        for at in range(len(line) + 1):
            spoilt = line[:at] + damage + line[at:]
            try:
                json.loads(spoilt)
            except ValueError:
                text = "\n".join([*LINES[:row], spoilt, *LINES[row + 1 :]])
                assert _named(tmp_path / "a.jsonl", text) == row + 1, spoilt


@pytest.mark.parametrize("form", ["[\n{}\n]\n", "[{}]\n", "[\n{}]"])
def test_a_list_with_a_row_on_each_line(form, tmp_path):
    before = form.partition("{}")[0].count("\n")
    for row, line in enumerate(LINES):
        for length in range(1, len(line)):
            cut = [*LINES[:row], line[:length], *LINES[row + 1 :]]
            text = form.replace("{}", ",\n".join(cut))
            assert _named(tmp_path / "a.json", text) == row + 1 + before, line[:length]
    assert _named(tmp_path / "a.json", form.replace("{}", ",\n".join(LINES))) is None


def test_a_list_that_ends_too_early(tmp_path):
    text = "[\n" + ",\n".join(LINES) + "\n"
    assert _named(tmp_path / "a.json", text) == 1 + len(LINES)


@pytest.mark.parametrize("row", range(1, 5))
def test_a_quote_that_is_not_closed(row, tmp_path):
    lines = ["text,n", '"a, b",1', '"c\nc",2', '"d",3', '"e ""f""",4']
    first = row + (row > 2)  # of a file whose third row has two lines
    spoilt = [*lines[:row], re.sub('",', ",", lines[row], count=1), *lines[row + 1 :]]
    assert _named(tmp_path / "a.csv", "\n".join(spoilt) + "\n") == 1 + first
    more = [*lines[:row], f"{lines[row]},5", *lines[row + 1 :]]
    assert _named(tmp_path / "a.csv", "\n".join(more) + "\n") == 1 + first
    good = tmp_path / "good.csv"
    good.write_text("\n".join(lines))
    assert [line for line, _ in numbered_rows(good)] == [2, 3, 5, 6]
