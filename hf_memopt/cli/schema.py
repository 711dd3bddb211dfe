"""`hf-memopt schema`: JSON schemas of what the commands print with --json, from the classes that hold it."""

import inspect
import re
import types
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Union, get_args, get_origin, get_type_hints

from hf_memopt.cli.output import print_json
from hf_memopt.errors import choose

_SIMPLE = {int: "integer", float: "number", str: "string", bool: "boolean", type(None): "null"}
_INTEGER, _NUMBER, _TEXT = {"type": "integer"}, {"type": "number"}, {"type": "string"}
_ANY: dict[str, Any] = {"type": "object"}
_OR_NONE = {"anyOf": [_ANY, {"type": "null"}]}


def run_schema(command: str) -> None:
    """Print a command's schema.

    Raises:
        InputError: there is no such command, or its output has no schema.
    """
    makers = {
        "advise": _advise,
        "doctor": _doctor,
        "dry-run": _dry_run,
        "estimate": lambda: _object(
            **_dry_run()["properties"], model=_TEXT, method=_TEXT, preset=_or_none(_TEXT), dtype=_TEXT
        ),
        "export": lambda: _object(directory=_TEXT, files=_list(_TEXT)),
        # For one card profiles, for --hardware any cards for a job, for --frames max frames of videos.
        "plan": lambda: {"oneOf": [_profiles(), _cards(), _frames()]},
        "presets": lambda: _object(presets=_list(_object(**_PRESET))),
        "show": _show,
    }
    if command not in makers:
        raise choose("command", command, makers)
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"hf-memopt {command} --json"}
    print_json(schema | makers[command]())


def _object(**properties: Mapping) -> dict[str, Any]:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _list(item: Mapping) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _or_none(schema: Mapping) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


def _properties(cls: type, leave_out: tuple[str, ...] = ()) -> dict[str, dict]:
    """A dataclass's fields, with their types and what the docstring says of them."""
    _, _, attributes = (inspect.getdoc(cls) or "").partition("Attributes:\n")
    matches = re.findall(r"^    ([\w, ]+): (.*?)(?=^    \S|\Z)", attributes, re.DOTALL | re.MULTILINE)
    texts = {name: " ".join(text.split()) for names, text in matches for name in names.split(", ")}
    hints = get_type_hints(cls)
    names = [item.name for item in fields(cls) if item.name not in leave_out]
    return {name: _type(hints[name]) | ({"description": texts[name]} if name in texts else {}) for name in names}


def _type(hint: Any) -> dict[str, Any]:
    if hint in _SIMPLE:
        return {"type": _SIMPLE[hint]}
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(part) for part in inner]}
    if origin in (list, tuple):
        return _list(_type(inner[0]))
    if origin is dict and inner[1] is not Any:
        return {"type": "object", "additionalProperties": _type(inner[1])}
    return {} if hint is Any else {"type": "object"}


def _estimate() -> dict[str, Any]:
    from hf_memopt.estimator.result import NOT_IN_JSON, Estimate

    fits = {"fits": {"type": ["boolean", "null"], "description": "null where the capacity is not known"}}
    return _object(**_properties(Estimate, leave_out=NOT_IN_JSON), **fits)


def _duration() -> dict[str, Any]:
    from hf_memopt.estimator.timing.duration import Duration

    return _or_none(_object(**_properties(Duration), hours=_NUMBER, error=_or_none(_NUMBER)))


def _dry_run() -> dict[str, Any]:
    from hf_memopt.estimator.suggestions import Saving

    devices = {"hardware": _TEXT, "devices": _INTEGER}
    savings = _list(_object(**_properties(Saving)))
    return _object(**_estimate()["properties"], **devices, duration=_duration(), levers=savings)


def _profiles() -> dict[str, Any]:
    from hf_memopt.planner.alternatives import Alternative, Rejected

    alternative = _object(**_properties(Alternative))
    answer = _object(
        model=_TEXT,
        method=_TEXT,
        hardware=_TEXT,
        devices=_INTEGER,
        usable_bytes=_INTEGER,
        usable_host_bytes=_or_none(_INTEGER),
        host_memory_source=_or_none(_TEXT),
        effective_batch_size=_INTEGER,
        seq_len=_INTEGER,
        profiles=_list(_profile()),
        rejected=_list(_object(**_properties(Rejected, leave_out=("slower",)))),
        plain=_or_none(alternative),
        methods=_list(alternative),
        missing_bytes=_or_none(_INTEGER),
        nearest=_list(_TEXT),
        notes=_list(_TEXT),
        exported=_list(_TEXT),
        durations={"type": "object", "additionalProperties": _duration()},
        edits=_or_none(_object(keys=_ANY, diff=_TEXT, launcher=_or_none(_TEXT))),
        data=_or_none(
            _object(
                rows=_INTEGER,
                bad_rows={"type": "object", "additionalProperties": _INTEGER},
                longer=_INTEGER,
                longest=_or_none(_INTEGER),
                tokens_are={"enum": ["counted", "estimated"]},
            )
        ),
    )
    answer["properties"]["quick"] = {"const": True, "description": "by sketches; absent of other plans"}
    return answer


def _profile() -> dict[str, Any]:
    return _object(
        profile={"enum": ["safe", "balanced", "aggressive", "maximum"]},
        settings=_TEXT,
        target_utilization=_NUMBER,
        strategy=_TEXT,
        training_arguments=_ANY,
        memory_arguments=_ANY,
        model_kwargs=_ANY,
        lora=_OR_NONE,
        launch=_or_none(_TEXT),
        estimate=_estimate(),
        relative_speed=_NUMBER,
        relative_speed_is=_TEXT,
        tokens_per_second=_or_none(_NUMBER),
    )


def _cards() -> dict[str, Any]:
    texts = ("hardware", "label", "method", "settings", "strategy", "profile")
    numbers = ("micro_batch", "accumulation", "devices", "device_bytes", "capacity_bytes", "host_bytes")
    card = _object(
        **dict.fromkeys(texts, _TEXT),
        **dict.fromkeys(numbers, _INTEGER),
        **dict.fromkeys(("tokens_per_second", "hours", "price_per_hour", "cost"), _or_none(_NUMBER)),
        fills=_NUMBER,
        near_limit={"type": "boolean"},
        source={"enum": ["estimate", "sketch"]},
    )
    return _object(
        model=_TEXT,
        seq_len=_INTEGER,
        effective_batch_size=_INTEGER,
        tokens=_or_none(_INTEGER),
        currency=_or_none(_TEXT),
        cards=_list(card),
        first={"type": "object", "additionalProperties": _TEXT},
        instead=_list(card),
        least=_or_none(_object(hardware=_TEXT, bytes=_INTEGER, settings=_TEXT)),
    )


def _frames() -> dict[str, Any]:
    row = _object(max_pixels_per_frame=_or_none(_INTEGER), max_frames=_INTEGER, seq_len=_INTEGER, estimate=_estimate())
    return _object(frames=_list(row), training_arguments=_ANY, capacity_bytes=_or_none(_INTEGER))


def _advise() -> dict[str, Any]:
    """The advice; where there is nothing to explain `what` alone, null."""
    from hf_memopt.reports.advice import Advice

    return {"oneOf": [_object(**_properties(Advice)), _object(what={"type": "null"})]}


_PRESET = {
    "name": _TEXT,
    "hardware_name": _TEXT,
    "method": {"enum": ["full", "lora", "qlora"]},
    "strategy": _TEXT,
    "devices": _INTEGER,
    "per_device_train_batch_size": _INTEGER,
    "gradient_accumulation_steps": _INTEGER,
    "effective_batch_size": _INTEGER,
    "seq_len": _INTEGER,
    "reference_model": _TEXT,
    "largest_model": _or_none(_TEXT),
}


def _show() -> dict[str, Any]:
    objects = ("training_arguments", "model_kwargs", "accelerate_config", "environment", "video_tiers", "hardware")
    return _object(
        **_PRESET,
        meant_for=_TEXT,
        **dict.fromkeys(objects, _ANY),
        **dict.fromkeys(("quantization", "lora", "deepspeed_config", "reference_estimate"), _OR_NONE),
        trl_defaults=_list(_ANY),
    )


def _doctor() -> dict[str, Any]:
    """The report on this machine; with files, their faults."""
    fault = _object(file=_TEXT, line=_or_none(_INTEGER), message=_TEXT)
    package = _object(version=_or_none(_TEXT), tested=_or_none(_TEXT), needed_for=_TEXT)
    machine = _object(
        device=_ANY,
        device_count=_INTEGER,
        free_memory_bytes=_INTEGER,
        calibration=_or_none(_TEXT),
        data_loading=_ANY,
        host_memory_bytes=_INTEGER,
        python=_TEXT,
        system=_TEXT,
        would_use={"type": "object", "additionalProperties": _TEXT},
        packages={"type": "object", "additionalProperties": package},
        problems=_list(_TEXT),
        notes=_list(_TEXT),
    )
    texts = {"type": "object", "additionalProperties": _TEXT}
    return {"oneOf": [machine, _object(checked=texts, faults=_list(fault), notes=texts)]}
