"""What the files of a run's folder may hold, checked once where they are read, so that no page has to ask again.

Every field may be missing, and unknown ones are passed on as they are: other versions write others.
"""

import math
from collections.abc import Callable
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.oom.classify import OomKind

LARGEST = 2**63  # bytes, steps, samples: what fits into the integers of torch and of matplotlib
Check = Callable[[Any, str], None]  # gets a value and its name; raises InputError


def _plain(expected: str, holds: Callable[[Any], bool]) -> Check:
    """The check of one value, by what it has to be, in words and as a function."""

    def check(value: Any, name: str) -> None:
        if not holds(value):
            raise InputError(f"{name} is {_shown(value)}, not {expected}")

    return check


def _shown(value: Any) -> str:
    text = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or math.isfinite(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST


TEXT = _plain("a text", lambda value: isinstance(value, str))
WORD = _plain("a text or a number", lambda value: isinstance(value, str) or _is_count(value))
COUNT = _plain("a whole number of 0 or more", _is_count)
BYTES = _plain("a number of bytes", lambda value: _is_finite(value) and 0 <= value < LARGEST)
SIGNED_BYTES = _plain("a number of bytes", lambda value: _is_finite(value) and abs(value) < LARGEST)
SECONDS = _plain("a time in seconds", lambda value: _is_finite(value) and 0 <= value < 2**40)
RATE = _plain("a number of 0 or more", lambda value: _is_finite(value) and 0 <= value < LARGEST)
PART = _plain("a share of 1", lambda value: _is_finite(value) and 0 <= value <= 1)
SHARE = _plain("a share", lambda value: _is_finite(value) and 0 <= value <= 1000)
LOSS = _plain("a number", lambda value: _is_number(value) and (isinstance(value, float) or abs(value) < LARGEST))
ANYTHING = _plain("anything", lambda value: True)
OOM_KIND = _plain(f"one of {', '.join(OomKind)}", lambda value: value in list(OomKind))


def lists(check: Check) -> Check:
    """The check of lists whose values are all alike."""

    def checked(value: Any, name: str) -> None:
        if not isinstance(value, list):
            raise InputError(f"{name} is {_shown(value)}, not a list")
        for index, one in enumerate(value):
            check(one, f"{name}[{index}]")

    return checked


def mappings(check: Check) -> Check:
    """The check of objects whose values are all alike."""

    def checked(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise InputError(f"{name} is {_shown(value)}, not an object")
        for key, one in value.items():
            check(one, f"{name}.{key[:60]}")

    return checked


def objects(**checks: Check) -> Check:
    """The check of objects with known fields. A known field that is null is taken out, as if it were missing."""

    def checked(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise InputError(f"{name} is {_shown(value)}, not an object")
        for key, check in checks.items():
            if key in value and value[key] is None:
                del value[key]
            elif key in value:
                check(value[key], f"{name}.{key}" if name else key)

    return checked


def _phase_and_bytes(value: Any, name: str) -> None:
    if not isinstance(value, list) or len(value) != 2:
        raise InputError(f"{name} is {_shown(value)}, not a phase and its bytes")
    TEXT(value[0], f"{name}[0]")
    BYTES(value[1], f"{name}[1]")


_PEAKS = {name: BYTES for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")}
EVENT = objects(
    event=TEXT,
    step=COUNT,
    stage=TEXT,
    kind=OOM_KIND,
    cause=TEXT,
    reason=TEXT,
    message=TEXT,
    why_not_smaller=TEXT,
    remedy=TEXT,
    label=TEXT,
    status=TEXT,
    checkpoint=TEXT,
    micro_batch_before=COUNT,
    micro_batch_after=COUNT,
    samples_at_once=COUNT,
    utilization=SHARE,
    shapes=mappings(lists(COUNT)),
    dataset_indices=lists(ANYTHING),
    held_bytes=mappings(BYTES),
    predicted_breakdown=mappings(SIGNED_BYTES),
    next=lists(objects(change=TEXT, saved_bytes=SIGNED_BYTES)),
)
READING = objects(
    time=SECONDS,
    step=COUNT,
    phase=TEXT,
    status=TEXT,
    allocated=BYTES,
    peak_allocated=BYTES,
    capacity=BYTES,
    free=SIGNED_BYTES,
    tokens_per_second=RATE,
    data_wait_share=PART,
    device_busy_share=PART,
    disk_wait_share=PART,
    dataloader_num_workers=COUNT,
    processors=COUNT,
)
REPORT = objects(
    date=TEXT,
    model=TEXT,
    command=TEXT,
    preset=TEXT,
    method=TEXT,
    strategy=TEXT,
    hardware=objects(label=TEXT, memory_bytes=BYTES),
    versions=mappings(WORD),
    settings=mappings(ANYTHING),
    memory_arguments=objects(
        target_memory_utilization=SHARE, warning_threshold=SHARE, critical_threshold=SHARE, emergency_threshold=SHARE
    ),
    levers=mappings(ANYTHING),
    estimate=objects(
        **_PEAKS,
        device_bytes=BYTES,
        phase=TEXT,
        notes=lists(TEXT),
        breakdown=mappings(SIGNED_BYTES),
        phases=mappings(BYTES),
    ),
    predicted_timeline=lists(_phase_and_bytes),
    measured=objects(**_PEAKS, phases=mappings(BYTES)),
    held_out_loss=mappings(LOSS),
    global_step=COUNT,
    data_wait_share=PART,
    events=lists(EVENT),
)
