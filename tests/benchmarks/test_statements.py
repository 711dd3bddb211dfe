"""The budget of statements holds: what is over it, without one, or gone is named."""

import sys
from collections import Counter

import pytest
from conftest import ROOT


@pytest.mark.kept
@pytest.mark.slow
def test_rooms_over_their_budget_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import statements

    file = tmp_path / "a.py"
    file.write_text(
        '"""Text."""\n\n\ndef one(x):\n    """Text."""\n    if x:\n        return 1\n    x = 2; return x\n'
    )
    assert statements.count(file) == 5, "def, if, two returns and an assignment; no docstring"
    found = Counter({"data": 5, "video": 7, "new": 1})
    assert statements.faults(found, {"data": 5, "video": 6, "old": 3}) == [
        "new: 1 statements, and the budget is 0",
        "video: 7 statements, and the budget is 6",
        "old: no such room any more: take its budget out",
    ]
    assert {"data", "recipes", "top level"} <= statements.rooms().keys()
    sys.modules.pop("statements")
