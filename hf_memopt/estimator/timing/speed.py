"""Seconds that a step's kernels take on a device: a roofline with what published training runs reach of it.

A matmul takes its FLOPs at the device's rate and then its bytes at the memory's, any other kernel the longer of the
two, and none less than a launch. Fused attention has a rate of its own (hardware.attention_rates), and what fits the
device's cache moves at the cache's. The host launches kernels meanwhile. The constants are in hardware.constants;
benchmarks/speed_published.py compares the result with published speeds.
"""

from collections import Counter
from typing import NamedTuple

from hf_memopt.estimator.accounting.work import Attention, Kernel
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.attention_kernels import OTHER, attention_kernel, attention_rate
from hf_memopt.hardware.measured import constant, measured_value

_MEASURED_BYTES = 3 / 8192  # per FLOP of the matmuls of 16 bits that calibrate measures (calibration.device.rates)


class Seconds(NamedTuple):
    """Seconds of a job's kernels.

    Attributes:
        micro, optimizer: the device's, of a micro-batch and of the optimizer's step.
        launches: the host's, to launch a micro-batch's kernels one after another from Python.
    """

    micro: float
    optimizer: float
    launches: float


def kernel_seconds(
    kernels: Counter[Kernel], device: Hardware, attention: str | None = None, cached: float = 1.0
) -> Seconds:
    """Seconds of the kernels of one micro-batch and one optimizer step.

    Args:
        attention: the model's `attn_implementation`.
        cached: share of the device's cache that there is: what fits it moves at its rate.
    """
    ratio = constant("step_time_ratio", device).value
    micro, optimizer = (
        ratio
        * _total({kernel: n for kernel, n in kernels.items() if kernel.optimizer == once}, device, attention, cached)
        for once in (False, True)
    )
    launched = sum(count for kernel, count in kernels.items() if not kernel.optimizer)
    return Seconds(micro, optimizer, ratio * launched * constant("host_launch_seconds", device).value)


def _total(kernels: dict[Kernel, int], device: Hardware, attention: str | None, cached: float) -> float:
    rate, matmuls, bandwidth = _rate(device), _matmul_rate(device), memory_rate(device)
    exposed = constant("exposed_matmul_traffic", device).value
    wide = constant("fp32_matmul_share", device).value
    cache = (device.cache or constant("cache_bytes", device).value) * cached
    faster = constant("cache_speedup", device).value
    launch = constant("launch_seconds", device).value
    seconds = 0.0
    for kernel, count in kernels.items():
        moving = kernel.bytes / bandwidth / (1 if kernel.bytes > cache else faster)
        if kernel.matmul:
            computing = kernel.flops / (matmuls * (wide if kernel.matmul == 4 else 1)) + exposed * moving
        elif kernel.attention:
            computing = kernel.flops / (rate * _attention_share(kernel.attention, device, attention))
        else:
            computing = kernel.flops / matmuls
        seconds += count * max(computing, moving, launch)
    return seconds


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
    return _rate(device) * constant("matmul_efficiency", device).value


def _attention_share(work: Attention, device: Hardware, implementation: str | None) -> float:
    kernel = attention_kernel(device, implementation, work.element, work.masked)
    share = attention_rate(device, kernel, work.element, work.head_size, work.keys, work.backward)
    return share * constant("fp32_matmul_share", device).value if kernel == OTHER and work.element == 4 else share


def _rate(device: Hardware) -> float:
    """FLOP/s in 16 bits, of which kernels reach a share."""
    if (measured := measured_value("matmul_flops_per_second", device)) is not None:
        return measured / constant("matmul_efficiency", device).value
    if rate := peak_rate(device):
        return rate
    matmuls = constant("flops_per_byte", device).value * memory_rate(device)
    return matmuls / constant("matmul_efficiency", device).value


def memory_rate(device: Hardware) -> float:
    """Bytes/s of device memory that kernels reach which are not matmuls. Calibration measures copies, which reach
    more."""
    efficiency = constant("bandwidth_efficiency", device).value
    if (measured := measured_value("bandwidth_bytes_per_second", device)) is not None:
        return measured * efficiency / constant("copy_efficiency", device).value
    return efficiency * (device.bandwidth or constant("unknown_bandwidth", device).value)
