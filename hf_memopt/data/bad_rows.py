"""Rows that cannot be trained on: all are found before the first is trained on, and counted by what is wrong."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hf_memopt import __version__
from hf_memopt.data.columns import Judge, row_number
from hf_memopt.data.row_files import Place
from hf_memopt.data.sources import say_once
from hf_memopt.errors import InputError

_KINDS = 5  # that a message spells out
_VALUE = re.compile(r", not |: [{\[]| \(")  # what follows is a row's own


@dataclass
class BadRows:
    """Rows that a judge refuses.

    Attributes:
        total: rows that were judged.
        counts: how many rows are refused, by reason.
        first: the first row of each reason, with its place, as messages say it.
    """

    total: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    first: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        return f"{self.count:,} of {_rows(self.total)} left out: {self.listed()}"

    def listed(self) -> str:
        """Each reason with its first row and the number of its rows."""
        named = [f"{first} ({_rows(count)})" for first, count in zip(self.first, self.counts.values(), strict=True)]
        more = [f"{len(named) - _KINDS} other reasons"] if len(named) > _KINDS else []
        return "; ".join(named[:_KINDS] + more)

    def refuse(self, switch: str | None) -> None:
        """Refuse the data where rows are bad.

        Args:
            switch: that leaves them out, as it is written here; None where it was given: some row has to be good.

        Raises:
            InputError: with all reasons.
        """
        if self.count and switch:
            raise InputError(
                f"{self.listed()}: {self.count} of {_rows(self.total)} cannot be trained on; correct them, or leave "
                f"them out by {switch}"
            )
        if self.count == self.total:
            raise InputError(f"{self.listed()}: none of {_rows(self.total)} can be trained on")


def _rows(count: int) -> str:
    return f"{count:,} row{'' if count == 1 else 's'}"


def _why_refused(row: dict[str, Any], judge: Judge) -> str | None:
    """What is wrong with a row, without the row's own values; None of a good row."""
    message = _message(row, judge, "")
    return None if message is None else _VALUE.split(message)[0]


def _described(refused: Iterable[tuple[int, str, dict[str, Any]]], total: int, judge: Judge, source: str) -> BadRows:
    """Bad rows by their reason.

    Args:
        refused: number, _why_refused() and content of each bad row.
    """
    kinds: dict[str, list] = {}
    for number, why, row in refused:
        kinds.setdefault(why, []).append((number, row))
    bad = BadRows(total)
    for rows in sorted(kinds.values(), key=lambda rows: min(number for number, _ in rows)):
        number, row = min(rows, key=lambda one: one[0])
        reason = _message(row, judge, "").removeprefix(": ")
        bad.counts[reason] = bad.counts.get(reason, 0) + len(rows)
        if len(bad.first) < len(bad.counts):
            bad.first.append(_message(row, judge, Place(source, number)))
    return bad


def _message(row: dict[str, Any], judge: Judge, where) -> str | None:
    """What a judge says of a row that it refuses; None of a good row."""
    try:
        judge(row, where)
        return None
    except InputError as error:
        return str(error)


def sift(
    parts, judge: Judge, source: str, skip: bool = False, switch: str = "--skip_bad_rows"
) -> tuple[list, BadRows]:
    """Parts of a data set without the rows that a judge refuses.

    Args:
        parts: training and held-out rows, Datasets or streams; None where there are none.
        skip: leave bad rows out; else they end the run.
        switch: what does so, as it is written here.

    Returns:
        The parts, and what was left out; of a stream, whose rows are judged when they are read, nothing is known yet.

    Raises:
        InputError: bad rows that are not to be skipped; of a stream, when the first is read.
    """
    if any(rows is not None and not hasattr(rows, "__len__") for rows in parts):
        keep = partial(_keep_of_stream, judge=judge, source=source, skip=skip, reported=set())
        return [rows and rows.filter(keep, with_indices=True) for rows in parts], BadRows()
    kept, refused = [], []
    for rows in parts:
        reasons = [] if rows is None else _judge_all(rows, judge)
        places = [index for index, why in enumerate(reasons) if why]
        numbers = getattr(rows, "_indices", None)
        refused += [(row_number(numbers, index), reasons[index], rows[index]) for index in places]
        good = [index for index, why in enumerate(reasons) if not why]
        kept.append(rows.select(good) if places else rows)
    bad = _described(refused, sum(map(len, filter(None, parts))), judge, source)
    bad.refuse(None if skip else switch)
    return kept, bad


def _judge_all(rows, judge: Judge) -> list[str | None]:
    """_why_refused() of each row, kept by `datasets` until rows, judge or version change."""
    from datasets import Features, Value

    settings: dict[str, Any] = {
        "remove_columns": rows.column_names,
        "features": Features({"refused": Value("string")}),
        "fn_kwargs": {"judge": judge, "version": __version__},
    }
    return rows.map(_judged, desc="checking rows", **settings)["refused"][:]


def _judged(row: dict, judge: Judge, version: str) -> dict[str, str | None]:
    """Of a module, so that `datasets` hashes it by its name: it cannot hash one that holds a judge."""
    return {"refused": _why_refused(row, judge)}


def _keep_of_stream(row: dict, index: int, judge: Judge, source: str, skip: bool, reported: set[str]) -> bool:
    if (why := _why_refused(row, judge)) is None:
        return True
    if skip and why in reported:
        return False
    message = _message(row, judge, Place(source, index, dict(row)))
    if not skip:
        raise InputError(f"{message}; correct it, or leave such rows out by --skip_bad_rows")
    reported.add(why)
    say_once("note: skip_bad_rows: left out, with all rows like it: %s", message)
    return False
