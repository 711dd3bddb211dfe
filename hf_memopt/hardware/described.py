"""A device that the user describes, as JSON on the command line or in a TOML file."""

import json
import re
import tomllib
from typing import Any

from hf_memopt.errors import InputError, brief, choose
from hf_memopt.files import read_bytes
from hf_memopt.hardware.catalog import FIGURES, Hardware
from hf_memopt.units import GIB

_LARGEST = 64 * 1024  # bytes of a description
_UNITS = {
    "": 1.0,
    "GIB": GIB,
    "GB": 1e9,
    "TIB": 1024 * GIB,
    "GB/S": 1e9,
    "TB/S": 1e12,
    "TFLOPS": 1e12,
    "PFLOPS": 1e15,
}
_QUANTITIES = ("memory", "nominal_memory", "bandwidth", "bf16_flops", "fp16_flops", "host_link", "peer_link")
_FLAGS = ("native_bf16", "fp8", "unified_memory")
_TEXTS = ("name", "label", "vendor", "backend", "architecture")
_BACKENDS = {"cuda": "nvidia", "rocm": "amd", "mps": "apple", "xpu": "intel", "cpu": "cpu"}
_OLDEST_WITH_BF16 = {"cuda": "8.0", "rocm": "gfx90a"}  # what a device without an architecture counts as
_EXAMPLE = '{"name": "my card", "memory": "24 GiB", "bandwidth": "1008 GB/s", "bf16_flops": "165 TFLOPS"}'


def described_text(text: str) -> bool:
    """True if a text describes a device rather than naming one."""
    return text.lstrip().startswith("{") or text.endswith(".toml")


def described(text: str) -> Hardware | None:
    """The device of a JSON object or TOML file; None where the text is neither.

    Fields are those of Hardware; only `memory` must be there. Quantities are numbers in bytes, bytes/s and FLOP/s, or
    texts with a unit: "24 GiB", "1008 GB/s", "165 TFLOPS".

    Raises:
        InputError: an unreadable file, an unknown field, or a value of another kind.
    """
    if text.lstrip().startswith("{"):
        return _build(_parsed(json.loads, text, "JSON"), "--hardware")
    if text.endswith(".toml"):
        return _build(_parsed(tomllib.loads, read_bytes(text, _LARGEST).decode("utf-8", "replace"), "TOML"), text)
    return None


def _parsed(parse, text: str, kind: str) -> dict[str, Any]:
    try:
        return parse(text)
    except ValueError as error:
        raise InputError(f"hardware: not {kind} ({error}); write it as {_EXAMPLE}") from error


def _build(entry: dict[str, Any], origin: str) -> Hardware:
    fields = (*_QUANTITIES, *_FLAGS, *_TEXTS)
    for name, value in entry.items():
        if name not in fields:
            raise choose("field of hardware", name, fields)
        expected = bool if name in _FLAGS else str if name in _TEXTS else (int, float, str)
        if not isinstance(value, expected) or (name in _QUANTITIES and isinstance(value, bool)):
            raise InputError(f"hardware: {name}={brief(value)} is not what it takes; write it as {_EXAMPLE}")
    if "memory" not in entry:
        raise InputError(f"hardware: memory is missing; write it as {_EXAMPLE}")
    quantities = {name: _quantity(name, entry[name]) for name in _QUANTITIES if name in entry}
    memory = round(quantities["memory"])
    if memory < GIB // 4:
        raise InputError(
            f'hardware: memory={brief(entry["memory"])} is in bytes; write it with a unit, as in "24 GiB"'
        )
    backend = entry.get("backend", "cuda")
    if backend not in _BACKENDS:
        raise choose("backend", backend, _BACKENDS)
    architecture = entry.get("architecture", _OLDEST_WITH_BF16.get(backend, ""))
    if backend == "cuda" and not re.fullmatch(r"\d+\.\d", architecture):
        raise InputError(f'hardware: architecture={brief(architecture)} must be a compute capability, as in "8.9"')
    if backend == "rocm" and not re.fullmatch(r"gfx\d{2,}[0-9a-f]", architecture):
        raise InputError(f'hardware: architecture={brief(architecture)} must be a gfx target, as in "gfx942"')
    capability = float(architecture) if backend == "cuda" else 0.0
    native = entry.get("native_bf16", "bf16_flops" in entry or capability >= 8.0)
    rate = quantities.get("fp16_flops", quantities.get("bf16_flops"))
    name = entry.get("name", "described")
    return Hardware(
        name=name,
        label=entry.get("label", entry.get("name", "the described device")),
        vendor=entry.get("vendor", _BACKENDS[backend]),
        backend=backend,
        nominal_memory=round(quantities.get("nominal_memory", memory)),
        memory=memory,
        bandwidth=quantities.get("bandwidth"),
        bf16_flops=quantities.get("bf16_flops", rate) if native else None,
        fp16_flops=rate,
        native_bf16=native,
        fp8=entry.get("fp8", capability >= 8.9),
        host_link=quantities.get("host_link"),
        peer_link=quantities.get("peer_link"),
        architecture=architecture,
        unified_memory=entry.get("unified_memory", backend in ("cpu", "mps")),
        sources=dict.fromkeys(FIGURES, origin),
    )


def _quantity(name: str, value: float | str) -> float:
    """A number, or a text of a number and a unit."""
    parts = re.fullmatch(r"\s*(\d+\.?\d*(?:e\+?\d{1,2})?)\s*([A-Za-z/]*)\s*", str(value))
    if not parts or parts[2].upper() not in _UNITS:
        raise InputError(f"hardware: {name}={brief(value)} is not a quantity; write it as {_EXAMPLE}")
    return float(parts[1]) * _UNITS[parts[2].upper()]
