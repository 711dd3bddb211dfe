"""The schema of a run's files, checked once where they are read, so that no page has to check again.

Every field may be missing, and unknown ones pass unchanged: other versions write other fields.
"""

import math
from collections.abc import Callable
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import THRESHOLDS
from hf_memopt.oom.classify import OomKind

LARGEST = 2**63  # bytes, steps, samples: what fits into the integers of torch and of matplotlib
Check = Callable[[Any, str], None]  # takes a value and its name, raises InputError


def _scalar(expected: str, is_valid: Callable[[Any], bool]) -> Check:
    """A check of one value, from a description of valid values and a predicate."""

    def check(value: Any, name: str) -> None:
        if not is_valid(value):
            raise InputError(f"{name} is {_shorten(value)}, not {expected}")

    return check


def _shorten(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


TEXT = _scalar("a text", lambda value: isinstance(value, str))
LABEL = _scalar("a text or a number", lambda value: isinstance(value, str) or _is_count(value))
COUNT = _scalar("a whole number of 0 or more", _is_count)
BYTES = _scalar("a number of bytes", lambda value: _is_finite(value) and 0 <= value < LARGEST)
SIGNED_BYTES = _scalar("a number of bytes", lambda value: _is_finite(value) and abs(value) < LARGEST)
SECONDS = _scalar("a time in seconds", lambda value: _is_finite(value) and 0 <= value < 2**40)
RATE = _scalar("a number of 0 or more", lambda value: _is_finite(value) and 0 <= value < LARGEST)
FRACTION = _scalar("a share of 1", lambda value: _is_finite(value) and 0 <= value <= 1)
SHARE = _scalar("a share", lambda value: _is_finite(value) and 0 <= value <= 1000)
LOSS = _scalar("a number", lambda value: _is_number(value) and (isinstance(value, float) or abs(value) < LARGEST))
LIST = _scalar("a list", lambda value: isinstance(value, list))
OBJECT = _scalar("an object", lambda value: isinstance(value, dict))
ANYTHING = _scalar("anything", lambda value: True)
OOM_KIND = _scalar(f"one of {', '.join(OomKind)}", lambda value: value in list(OomKind))


def lists(check: Check) -> Check:
    """A check of lists whose values all pass `check`."""

    def checked(value: Any, name: str) -> None:
        LIST(value, name)
        for index, item in enumerate(value):
            check(item, f"{name}[{index}]")

    return checked


def mappings(check: Check) -> Check:
    """A check of objects whose values all pass `check`."""

    def checked(value: Any, name: str) -> None:
        OBJECT(value, name)
        for key, item in value.items():
            check(item, f"{name}.{key[:60]}")

    return checked


def objects(**checks: Check) -> Check:
    """A check of objects with known fields. A known field that is null is removed, as if it were missing."""

    def checked(value: Any, name: str) -> None:
        OBJECT(value, name)
        for key, check in checks.items():
            if key in value and value[key] is None:
                del value[key]
            elif key in value:
                check(value[key], f"{name}.{key}" if name else key)

    return checked


def _phase_and_bytes(value: Any, name: str) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise InputError(f"{name} is {_shorten(value)}, not a phase and its bytes")
    TEXT(value[0], f"{name}[0]")
    BYTES(value[1], f"{name}[1]")


def _each(check: Check, *names: str) -> dict[str, Check]:
    return dict.fromkeys(names, check)


_PEAKS = _each(BYTES, "peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")
EVENT = objects(
    **_each(TEXT, "event", "stage", "cause", "reason", "message", "why_not_smaller", "remedy", "label", "status"),
    **_each(COUNT, "step", "micro_batch_before", "micro_batch_after", "samples_at_once"),
    kind=OOM_KIND,
    checkpoint=TEXT,
    utilization=SHARE,
    shapes=mappings(lists(COUNT)),
    dataset_indices=lists(ANYTHING),
    held_bytes=mappings(BYTES),
    predicted_breakdown=mappings(SIGNED_BYTES),
    next=lists(objects(change=TEXT, saved_bytes=SIGNED_BYTES)),
)
READING = objects(
    **_each(TEXT, "phase", "status"),
    **_each(COUNT, "step", "dataloader_num_workers", "processors"),
    **_each(BYTES, "allocated", "peak_allocated", "capacity"),
    **_each(FRACTION, "data_wait_share", "device_busy_share", "disk_wait_share"),
    time=SECONDS,
    free=SIGNED_BYTES,
    tokens_per_second=RATE,
)
_ESTIMATE = objects(
    **_PEAKS,
    device_bytes=BYTES,
    phase=TEXT,
    notes=lists(TEXT),
    breakdown=mappings(SIGNED_BYTES),
    phases=mappings(BYTES),
)
REPORT = objects(
    **_each(TEXT, "date", "model", "command", "preset", "method", "strategy", "measured_batch"),
    **_each(mappings(ANYTHING), "settings", "levers"),
    **_each(_ESTIMATE, "estimate", "estimate_of_measured_batch"),
    hardware=objects(label=TEXT, memory_bytes=BYTES, devices=COUNT),
    versions=mappings(LABEL),
    memory_arguments=objects(**_each(SHARE, *THRESHOLDS)),
    predicted_timeline=lists(_phase_and_bytes),
    measured=objects(**_PEAKS, phases=mappings(BYTES)),
    speed=objects(setup=TEXT, **_each(RATE, "tokens_per_second", "predicted", "ratio")),
    held_out_loss=mappings(LOSS),
    global_step=COUNT,
    train_seconds=SECONDS,
    data_wait_share=FRACTION,
    events=lists(EVENT),
    rows=objects(total=COUNT, dropped=mappings(COUNT)),
    bad_videos=lists(TEXT),
)
