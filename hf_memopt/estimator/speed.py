"""Seconds that a step's kernels take on a device: a roofline with what published training runs reach of it.

A matmul takes its FLOPs at the device's rate and then its bytes at the memory's, any other kernel the longer of the
two, and none less than a launch. What fits the device's cache does not wait for its memory. The constants are in
hardware.constants; benchmarks/speed_published.py compares the result with published speeds.
"""

from collections import Counter

from hf_memopt.estimator.accounting.work import Kernel
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.measured import constant, measured_value

_MEASURED_BYTES = 3 / 8192  # per FLOP of the matmuls of 16 bits that calibrate measures (calibration.device.rates)


def kernel_seconds(kernels: Counter[Kernel], device: Hardware, cached: bool = True) -> tuple[float, float]:
    """Seconds of a micro-batch's kernels and of the optimizer's.

    Args:
        kernels: of one micro-batch and one optimizer step.
        cached: what fits the device's cache does not wait for its memory.
    """
    return _total(kernels, device, False, cached), _total(kernels, device, True, cached)


def _total(kernels: Counter[Kernel], device: Hardware, optimizer: bool, cached: bool) -> float:
    matmuls, attention, bandwidth = _matmul_rate(device), _attention_rate(device), memory_rate(device)
    exposed = constant("exposed_matmul_traffic", device).value
    wide = constant("fp32_matmul_share", device).value
    cache = constant("cache_bytes", device).value if cached else 0
    launch = constant("launch_seconds", device).value
    seconds = 0.0
    for kernel, count in kernels.items():
        if kernel.optimizer != optimizer:
            continue
        moving = kernel.bytes / bandwidth if kernel.bytes > cache else 0.0
        computing = kernel.flops / attention
        if kernel.matmul:
            computing = kernel.flops / (matmuls * (wide if kernel.matmul == 4 else 1)) + exposed * moving
        seconds += count * max(computing, moving, launch)
    return constant("step_time_ratio", device).value * seconds


def matmuls(kernels: Counter[Kernel]) -> int:
    """Count the matmuls of a micro-batch."""
    return sum(count for kernel, count in kernels.items() if kernel.matmul and not kernel.optimizer)


def has_rates(device: Hardware) -> bool:
    """True if both rates of a device are known, from the catalog or measured on it."""
    computes = peak_rate(device) or measured_value("matmul_flops_per_second", device)
    return bool(computes and (device.bandwidth or measured_value("bandwidth_bytes_per_second", device)))


def peak_rate(device: Hardware) -> float | None:
    """The catalog's 16-bit FLOP/s; None where none is published."""
    return device.bf16_flops or device.fp16_flops


def _matmul_rate(device: Hardware) -> float:
    """FLOP/s of a matmul beside its traffic."""
    if (measured := measured_value("matmul_flops_per_second", device)) is not None:
        exposed = constant("exposed_matmul_traffic", device).value * _MEASURED_BYTES / memory_rate(device)
        return measured / max(0.5, 1 - measured * exposed)  # half is computing, whatever a file says
    return _catalog_rate(device, "matmul_efficiency")


def _attention_rate(device: Hardware) -> float:
    if (measured := measured_value("matmul_flops_per_second", device)) is not None:
        return measured * constant("attention_efficiency", device).value / constant("matmul_efficiency", device).value
    return _catalog_rate(device, "attention_efficiency")


def _catalog_rate(device: Hardware, efficiency: str) -> float:
    if rate := peak_rate(device):
        return rate * constant(efficiency, device).value
    return constant("flops_per_byte", device).value * memory_rate(device)


def memory_rate(device: Hardware) -> float:
    """Bytes/s of device memory that kernels reach which are not matmuls. Calibration measures copies, which reach
    more."""
    efficiency = constant("bandwidth_efficiency", device).value
    if (measured := measured_value("bandwidth_bytes_per_second", device)) is not None:
        return measured * efficiency / constant("copy_efficiency", device).value
    bandwidth = device.bandwidth or constant("unknown_bandwidth", device).value
    return bandwidth * efficiency
