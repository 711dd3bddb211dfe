"""Constants that `hf-memopt calibrate` has measured on a device: where they are kept, how they are checked, when they
count.

A file a device, PyTorch version, CUDA or ROCm version and driver, in devices/ of the cache. benchmarks/results/devices
has files that users gave; they are read by the same function, but no prediction uses them.
"""

import functools
import logging
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, brief, one_line
from hf_memopt.files import cache_folder, parse_json, read_bytes
from hf_memopt.hardware.catalog import GB, Hardware
from hf_memopt.hardware.constants import Constant, assumed
from hf_memopt.terminal import plain
from hf_memopt.units import MIB


@dataclass(frozen=True)
class Measurable:
    """A constant that calibrate measures.

    Attributes:
        label: as shown in a table.
        unit: as stored.
        lowest, highest: beyond them a file is damaged, whatever it says.
    """

    label: str
    unit: str
    lowest: float
    highest: float


# Rates are stored as they are, not as shares, so that they hold for devices which the catalog lacks.
MEASURABLE = {
    "context_bytes": Measurable("context", "bytes", 0, 16 * 2**30),
    "workspace_bytes": Measurable("cuBLAS workspace", "bytes", 0, 2 * 2**30),
    "matmul_flops_per_second": Measurable("matmuls, 16 bits", "FLOP/s", 1e9, 1e17),
    "bandwidth_bytes_per_second": Measurable("memory bandwidth", "bytes/s", 1e8, 1e15),
    "host_link_bytes_per_second": Measurable("host to device", "bytes/s", 1e7, 1e13),
    "launch_seconds": Measurable("kernel launch", "seconds", 0, 1e-2),
    "step_time_ratio": Measurable("step time", "measured ÷ predicted", 1e-2, 1e3),
}

SPEEDS = tuple(name for name, row in MEASURABLE.items() if row.unit != "bytes")
_SHOWN = {
    "bytes": lambda value: f"{value / MIB:,.{0 if value > 100 * MIB else 1}f} MiB",
    "FLOP/s": lambda value: f"{value / 1e12:,.1f} TFLOP/s",
    "bytes/s": lambda value: f"{value / GB:,.1f} GB/s",
    "seconds": lambda value: f"{value * 1e6:,.1f} µs",
    "measured ÷ predicted": lambda value: f"{value:.2f} × the kernels'",
}


def show(name: str, value: float) -> str:
    """A measured constant with its name and unit, for people."""
    return f"{MEASURABLE[name].label} {show_value(name, value)}"


def show_value(name: str, value: float) -> str:
    """The value with its unit."""
    return _SHOWN[MEASURABLE[name].unit](value)


logger = logging.getLogger(__name__)

FORMAT = 1  # of a device's file; files of another one are not read
SWITCH = "HF_MEMOPT_CALIBRATION"  # off: predictions rest on the table alone, as the ones in docs/ do
VERSIONS = ("torch", "runtime", "driver")  # a file counts only under the ones that it was measured with
_LARGEST = 2**20  # bytes; a file has some twenty KiB
_LONGEST = 200  # characters of a text
_ERROR = (-1.0, 100.0)  # predicted over measured, less 1


@dataclass(frozen=True)
class DeviceFile:
    """The measurements of one device.

    Attributes:
        device: name (of the catalog, or generic_…), label, backend, architecture and memory (bytes).
        versions: torch, runtime (CUDA's or ROCm's), driver and others.
        date: of the last measurement.
        constants: of MEASURABLE, by name.
        reserved_errors: of each training job that was measured: predicted reserved bytes over measured, less 1.
        rehearsal: played on a CPU, and so of no card.
    """

    device: Mapping[str, Any]
    versions: Mapping[str, str | None]
    date: str
    constants: Mapping[str, float]
    reserved_errors: tuple[float, ...]
    rehearsal: bool

    @property
    def source(self) -> str:
        """The device and the date of the measurements, for a note."""
        versions = [
            f"{name} {self.versions[key]}" for key, name in self.version_names.items() if self.versions.get(key)
        ]
        return f"measured on {self.device['label']} ({', '.join([self.date, *versions])})"

    @property
    def version_names(self) -> dict[str, str]:
        """The names of VERSIONS, for people."""
        runtime = {"cuda": "CUDA", "rocm": "ROCm"}.get(self.device["backend"], "runtime")
        return {"torch": "torch", "runtime": runtime, "driver": "driver"}


def constant(name: str, device: Hardware) -> Constant:
    """A constant of a device: measured on it where it was, else the table's.

    Raises:
        KeyError: there is none of that name.
    """
    value = measured_value(name, device)
    row = assumed(name, device)
    return row if value is None else replace(row, value=value, measured=True, source=measured_on(device).source)


def measured_value(name: str, device: Hardware) -> float | None:
    """The value that calibrate measured on a device; None where it did not."""
    file = measured_on(device)
    return None if file is None else file.constants.get(name)


def measured_on(device: Hardware) -> DeviceFile | None:
    """The file of a device that counts now; None where there is none. What does not count is named once, in a warning.

    One of another device never counts, nor one of another PyTorch, CUDA, ROCm or driver. Where this machine cannot
    tell its own (a CPU build of PyTorch, a login node without a driver), the file's are taken to be right.
    """
    if device.backend == "cpu" or is_off():
        return None
    return _newest(device.name, device.label, str(device_folder()))


def is_off(switch: str = SWITCH) -> bool:
    """True if the environment says that what was measured here does not count."""
    return os.environ.get(switch, "").lower() in ("off", "0", "false")


def device_folder() -> Path:
    """The folder of the files of this user's devices."""
    return cache_folder() / "devices"


def device_path(device: Hardware, versions: Mapping[str, str | None]) -> Path:
    """The file of a device under these versions."""
    parts = [_slug(device.label), *(f"{key}_{versions[key]}" for key in VERSIONS if versions.get(key))]
    name = "-".join(re.sub(r"[^\w.]+", "_", part)[:80] for part in parts)
    return device_folder() / f"{name}.json"


def _slug(label: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", label.lower()).strip("_")


@functools.cache
def _newest(name: str, label: str, folder: str) -> DeviceFile | None:
    """Cached, so that a warning comes once and a process keeps its figures."""
    counting, stale = [], []
    for path in sorted(Path(folder).glob(f"{_slug(label)}-*.json")):
        try:
            file = read_device_file(path)
        except InputError as error:
            logger.warning("%s: ignored; run hf-memopt calibrate again", error)
            continue
        if file.rehearsal or not file.constants or (file.device["name"], file.device["label"]) != (name, label):
            continue
        versions, named = versions_here(), file.version_names
        different = ", ".join(
            f"{named[key]} {file.versions[key]} (here {versions[key]})"
            for key in VERSIONS
            if versions[key] and file.versions.get(key) and versions[key] != file.versions[key]
        )
        (stale if different else counting).append((file, path, different))
    if stale and not counting:
        _, path, different = stale[-1]
        logger.warning("%s was measured with %s: ignored; run hf-memopt calibrate again", path, different)
    return max((file for file, *_ in counting), key=lambda file: file.date, default=None)


@functools.cache
def versions_here() -> dict[str, str | None]:
    """The versions that memory and speed depend on; None where this machine has or tells none."""
    import torch

    return {
        "torch": metadata.version("torch").partition("+")[0],
        "runtime": torch.version.hip or torch.version.cuda,
        "driver": _driver(bool(torch.version.hip)),
    }


def _driver(amd: bool) -> str | None:
    """The display driver's version, asked without starting CUDA."""
    if platform.system() == "Darwin":
        return f"macOS {platform.mac_ver()[0]}"
    try:
        if amd:  # a driver that comes with the kernel has no file of its own: the kernel's version stands for it
            file = Path("/sys/module/amdgpu/version")
            loaded = Path("/sys/module/amdgpu").is_dir()
            return file.read_text().strip() if file.is_file() else platform.release() if loaded else None
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        return answer.split("\n")[0].strip() or None
    except (OSError, subprocess.SubprocessError):  # no driver here
        return None


def read_device_file(path: str | Path) -> DeviceFile:
    """A file that `hf-memopt calibrate` wrote, checked.

    Raises:
        InputError: unreadable, damaged, of a later format, or with figures that no device has.
    """
    try:
        content = parse_json(read_bytes(path, _LARGEST).decode("utf-8"))
        if not isinstance(content, dict):
            raise ValueError("not an object")
        return parse_device_file(content)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path} is damaged: {one_line(error)}") from error


def parse_device_file(content: dict) -> DeviceFile:
    """The same of its parsed content.

    Raises:
        ValueError: which part of it is not as calibrate writes it.
    """
    if content.get("format") != FORMAT:
        raise ValueError(f"format is {brief(content.get('format'))}, and {FORMAT} is read")
    device, versions = content.get("device"), content.get("versions")
    if not isinstance(device, dict) or not isinstance(versions, dict):
        raise ValueError("device and versions must be objects")
    for key in ("name", "label", "backend"):
        _check_text(f"device.{key}", device.get(key))
    for key, value in versions.items():
        if value is not None:
            _check_text(f"versions.{key}", value)
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", str(content.get("date"))):
        raise ValueError(f"date is {brief(content.get('date'))}, not YYYY-MM-DD")
    if not isinstance(content.get("rehearsal"), bool):
        raise ValueError("rehearsal must be true or false")
    constants = content.get("constants")
    if not isinstance(constants, dict):
        raise ValueError("constants must be an object")
    for name, value in constants.items():
        if name not in MEASURABLE:
            raise ValueError(f"constant {brief(name)} is not known")
        _check_number(f"constants.{name}", value, MEASURABLE[name].lowest, MEASURABLE[name].highest)
    errors = content.get("reserved_errors", [])
    if not isinstance(errors, list):
        raise ValueError("reserved_errors must be a list")
    for value in errors:
        _check_number("reserved_errors", value, *_ERROR)
    return DeviceFile(device, versions, content["date"], constants, tuple(errors), content["rehearsal"])


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str) or not 0 < len(value) <= _LONGEST or value != plain(value) or "\n" in value:
        raise ValueError(f"{name} must be one line of at most {_LONGEST} characters")


def _check_number(name: str, value: Any, lowest: float, highest: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not lowest <= value <= highest:
        raise ValueError(f"{name} is {brief(value)}, not a number from {lowest:g} to {highest:g}")
