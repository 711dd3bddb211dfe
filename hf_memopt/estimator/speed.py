"""Seconds that a step's kernels take on a device: a roofline with what published training runs reach of it.

Each kernel takes the longest of its FLOPs at the device's rate, its bytes at the memory's, and a launch. The constants
are in hardware.constants; benchmarks/speed_published.py compares the result with published speeds.
"""

from collections import Counter

from hf_memopt.estimator.accounting.work import Kernel
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.measured import constant, measured_value

_MEASURED_SIDE = 8192  # of the square matmuls that calibrate measures (calibration.device.rates)


def kernel_seconds(kernels: Counter[Kernel], device: Hardware) -> tuple[float, float]:
    """Seconds of a micro-batch's kernels and of the optimizer's.

    Args:
        kernels: of one micro-batch and one optimizer step.
    """
    return _total(kernels, device, False), _total(kernels, device, True)


def _total(kernels: Counter[Kernel], device: Hardware, optimizer: bool) -> float:
    matmuls, attention, bandwidth = _matmul_rate(device), _attention_rate(device), memory_rate(device)
    ramp = constant("matmul_ramp", device).value
    launch = constant("launch_seconds", device).value
    seconds = 0.0
    for kernel, count in kernels.items():
        if kernel.optimizer != optimizer:
            continue
        computing = kernel.flops / attention
        if kernel.narrowest:
            computing = kernel.flops / matmuls * (1 + ramp / kernel.narrowest)
        seconds += count * max(computing, kernel.bytes / bandwidth, launch)
    return constant("step_time_ratio", device).value * seconds


def has_rates(device: Hardware) -> bool:
    """Whether both rates of a device are known, from the catalog or measured on it."""
    computes = peak_rate(device) or measured_value("matmul_flops_per_second", device)
    return bool(computes and (device.bandwidth or measured_value("bandwidth_bytes_per_second", device)))


def peak_rate(device: Hardware) -> float | None:
    """The catalog's 16-bit FLOP/s; None where none is published."""
    return device.bf16_flops or device.fp16_flops


def _matmul_rate(device: Hardware) -> float:
    """FLOP/s of an unboundedly large matmul."""
    if (measured := measured_value("matmul_flops_per_second", device)) is not None:
        return measured * (1 + constant("matmul_ramp", device).value / _MEASURED_SIDE)
    return _catalog_rate(device, "matmul_efficiency")


def _attention_rate(device: Hardware) -> float:
    if (measured := measured_value("matmul_flops_per_second", device)) is not None:
        return measured * constant("attention_efficiency", device).value / constant("matmul_efficiency", device).value
    return _catalog_rate(device, "attention_efficiency")


def _catalog_rate(device: Hardware, efficiency: str) -> float:
    if known := peak_rate(device):
        return known * constant(efficiency, device).value
    return constant("flops_per_byte", device).value * memory_rate(device)


def memory_rate(device: Hardware) -> float:
    """Bytes/s of device memory."""
    if (measured := measured_value("bandwidth_bytes_per_second", device)) is not None:
        return measured
    known = device.bandwidth or constant("unknown_bandwidth", device).value
    return known * constant("bandwidth_efficiency", device).value
