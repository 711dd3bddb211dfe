"""The search along one axis: which candidates are estimated, and what it answers where memory is no line."""

from types import SimpleNamespace

import pytest

from hf_memopt.planner import first_fit
from hf_memopt.planner.first_fit import TRIES, FirstFit


def search_of(monkeypatch, memory, limit: int, **options) -> FirstFit:
    """Of lengths up to 10,000 in steps of 100, whose estimates are `memory` of a length."""
    monkeypatch.setattr(
        first_fit, "estimate_job", lambda length, map_fn: SimpleNamespace(device_bytes=int(memory(length)))
    )
    usual = {"first": 1000, "guess": lambda length, estimate: 4000} | options
    return FirstFit(
        candidates=range(10_000, 0, -100),
        tokens=lambda length: length,
        build=lambda length: length,
        used=lambda estimate: (estimate.device_bytes,),
        limits=(limit,),
        say=lambda length: None,
        **usual,
    )


def test_a_line_needs_three_estimates(monkeypatch):
    search = search_of(monkeypatch, lambda length: 5000 + 3 * length, 5000 + 3 * 7250)
    assert search.find() == 7200 and list(search.estimates) == [1000, 4000, 7200]


def test_what_bends_upwards_is_bracketed(monkeypatch):
    search = search_of(monkeypatch, lambda length: length**2 / 100, 490_000)
    answer = search.find()
    assert search.estimates[answer].device_bytes <= 490_000 and len(search.estimates) <= TRIES and answer >= 6800


@pytest.mark.parametrize(("near", "fits", "estimated"), [(0.1, 4300, False), (0.05, 4300, True), (0.2, 5000, True)])
def test_the_line_stands_for_an_estimate_that_is_near(monkeypatch, near, fits, estimated):
    search = search_of(monkeypatch, lambda length: 5000 + 3 * length, 5000 + 3 * fits, near=near)
    assert search.find() == fits and list(search.estimates) == [1000, 4000, fits][: 3 if estimated else 2]
    short = search_of(monkeypatch, float, 1150, near=0.2, guess=lambda length, estimate: 1100)
    assert short.find() == 1100 and 1100 in short.estimates, "one estimate is no line"


@pytest.mark.parametrize(("limit", "answer"), [(10, None), (10**9, 10_000)])
def test_the_ends_of_the_axis(monkeypatch, limit, answer):
    search = search_of(monkeypatch, lambda length: 100 + length, limit)
    assert search.find() == answer
    assert search.estimates[answer or 100]


def test_another_axis_tells_where_to_begin(monkeypatch):
    search = search_of(monkeypatch, lambda length: 5000 + 3 * length, 20_000)
    search.slope = [(10, SimpleNamespace(device_bytes=5030)), (20, SimpleNamespace(device_bytes=5060))]
    assert search.find() == 5000 and list(search.estimates) == [5000]


def test_where_memory_grows_in_steps_the_next_is_estimated_too(monkeypatch):
    def steps(length: int) -> int:
        return 1000 * (length // 1000 + 1)

    line, sure = (search_of(monkeypatch, steps, 4999, min_share=min_share) for min_share in (None, 0.98))
    assert line.find() <= sure.find() and sure.find() + 100 in sure.estimates


def test_the_line_goes_through_the_nearest_estimates(monkeypatch):
    search = search_of(monkeypatch, lambda length: length * length // 100, 10**9)
    for length in (1000, 3000, 6000, 9000):
        search.estimate(length)
    for length, nearest in ((2900, [3000, 1000]), (7000, [6000, 9000]), (100, [1000, 3000]), (9500, [9000, 6000])):
        assert [tokens for tokens, _ in search.nearest(length)] == nearest
    assert search.needs(6000) == (360_000,)
    (on_line,) = search.needs(7000)
    assert on_line == 360_000 + (810_000 - 360_000) / 3000 * 1000
