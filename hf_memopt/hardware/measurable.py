"""The assumptions about devices that `hf-memopt calibrate` measures: their units, limits and how they are shown."""

from dataclasses import dataclass

from hf_memopt.hardware.catalog import GB
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
