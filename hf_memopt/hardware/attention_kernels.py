"""Attention on a device: the implementation to choose, never silently, and the rate that each kernel reaches.

Curves of rates flatten with the number of keys that a query sees, and backward is slower than forward: figures 5 and 6
of the FlashAttention-3 paper (Shah et al. 2024, H100) and 4 to 7 of FlashAttention-2's (Dao 2023, A100).
"""

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hf_memopt.errors import InputError, one_line
from hf_memopt.hardware.catalog import Hardware, catalog_tables

logger = logging.getLogger(__name__)
_announce = cache(logger.warning)


@dataclass(frozen=True, kw_only=True)
class FlashAttention:
    """The requirements of a version of flash attention.

    Attributes:
        module: of its extension.
        package: to install.
        minimum, maximum: CUDA compute capability.
    """

    module: str
    package: str
    minimum: float
    maximum: float


# FlashAttention-2 is built for Ampere and later, FlashAttention-3 for Hopper alone (README.md of
# Dao-AILab/flash-attention). FlashAttention-4 computes gradients on 9.x to 12.x (_flash_attn_bwd of
# flash_attn/cute/interface.py), and transformers 5.23 refuses it below 9 (FLASH_ATTENTION_COMPATIBILITY_MATRIX).
FLASH = {
    "flash_attention_3": FlashAttention(
        module="flash_attn_interface", package="flash_attn_3", minimum=9.0, maximum=9.9
    ),
    "flash_attention_2": FlashAttention(module="flash_attn", package="flash-attn", minimum=8.0, maximum=12.9),
    "flash_attention_4": FlashAttention(module="flash_attn.cute", package="flash-attn-4", minimum=9.0, maximum=12.9),
}
# What resolve_attention() takes unasked, the fastest first; version 4 is in beta.
_UNASKED = ("flash_attention_3", "flash_attention_2")
# Kernels of the hub that are builds of these (FLASH_ATTN_KERNEL_FALLBACK of transformers 5.23).
HUB_KERNELS = {
    "kernels-community/flash-attn2": "flash_attention_2",
    "kernels-community/flash-attn3": "flash_attention_3",
    "kernels-community/vllm-flash-attn3": "flash_attention_3",
    "kernels-community/flash-attn4": "flash_attention_4",
}


def flash_attention(name: str | None) -> str | None:
    """The key of FLASH that an `attn_implementation` stands for; None for other attention.

    Args:
        name: `flash_attention_2`, or a kernel of the hub: `owner/name`, `owner/name@revision`, `owner/name:function`.
    """
    name = (name or "").partition(":")[0].partition("@")[0]
    return name if name in FLASH else HUB_KERNELS.get(name)


def check_attention(name: str | dict | None, hardware: Hardware) -> None:
    """Refuse an `attn_implementation` that a device cannot train with, whatever is installed here.

    Args:
        name: one name, or one for each part of a model.

    Raises:
        InputError: the device has no such kernel, or it is not known what the kernel allocates.
    """
    for part in name.values() if isinstance(name, dict) else [name]:
        if not isinstance(part, str | None):
            raise InputError(f"attn_implementation={part!r} must be a name, such as 'sdpa'")
        if part and (reason := _unsupported(part, hardware)):
            raise InputError(f"attn_implementation={part!r} cannot be used: {reason}; use attn_implementation='sdpa'")


def attention_names(config) -> Iterator[str]:
    """The `attn_implementation` of a configuration and of its parts."""
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if name := getattr(part, "_attn_implementation", None):
            yield name


def resolve_attention(hardware: Hardware, requested: str | None = None) -> str:
    """The `attn_implementation` to load a model with.

    Args:
        hardware: the device that the model will train on.
        requested: a name the user insists on; it is checked, not replaced.

    Raises:
        InputError: the requested flash attention cannot be used here.
    """
    if requested:
        check_attention(requested, hardware)
        if requested in FLASH and (reason := _obstacle(requested, hardware)):
            raise InputError(
                f"attn_implementation={requested!r} cannot be used: {reason}; use attn_implementation='sdpa'"
            )
        return requested
    reasons = []
    for name in _UNASKED:
        if not (reason := _obstacle(name, hardware)):
            _announce(f"attention: {name}")
            return name
        reasons.append(reason)
    _announce(f"attention: sdpa, not flash attention ({'; '.join(dict.fromkeys(reasons))})")
    return "sdpa"


def _unsupported(name: str, hardware: Hardware) -> str:
    """The reason that a device cannot train with an attention; "" where it can or where the name is not known."""
    if name.startswith("paged"):
        return "paged attention generates text, it does not train"
    if name == "flex_attention" and hardware.backend not in ("cuda", "rocm"):
        return f"flex attention has no backward on {hardware.label}"
    if (flash := flash_attention(name)) is not None:
        return _unfit(FLASH[flash], hardware)
    return f"of the hub's kernels only {', '.join(HUB_KERNELS)} are known" if "/" in name else ""


def _unfit(flash: FlashAttention, hardware: Hardware) -> str:
    if hardware.backend != "cuda":
        return f"{hardware.label} is not an NVIDIA card"
    if not flash.minimum <= hardware.capability <= flash.maximum:
        return (
            f"{hardware.label} has compute capability {hardware.architecture}, "
            f"it needs {flash.minimum} to {flash.maximum}"
        )
    return ""


def _obstacle(name: str, hardware: Hardware) -> str:
    """The reason that a flash attention cannot be used on a device of this machine, "" where it can."""
    flash = FLASH[name]
    return _unfit(flash, hardware) or _import_error(flash.module, flash.package)


@cache
def _import_error(module: str, package: str) -> str:
    # Really imported: a wheel built against another torch is installed but fails here, with an undefined symbol.
    try:
        importlib.import_module(module)
    except ModuleNotFoundError:
        return f"{package} is not installed"
    except (ImportError, OSError, RuntimeError) as error:
        return f"{package} is installed but broken ({one_line(error)[:160]})"
    import torch

    return "" if torch.cuda.is_available() else "PyTorch sees no CUDA device"


# Keys that a query sees at which a kernel reaches half of its rate: with heads of 128 on an H100, causal curves of
# FlashAttention-2 and cuDNN follow keys / (keys + 200) within 7 % (tests/hardware/test_attention_rates.py).
HALF = 200
EFFICIENT = "memory-efficient"  # what torch takes for 32 bits, for masks, and before Ampere
CUDNN = "cuDNN"  # what torch 2.11 and later take on Hopper and B200, with masks too (transformers PR 48163)
OTHER = "another vendor's"


@dataclass(frozen=True, kw_only=True)
class AttentionRate:
    """Shares of the 16-bit rate that a kernel reaches with many keys.

    Attributes:
        kernel: a key of FLASH, CUDNN, EFFICIENT or OTHER.
        element: bytes of a query's element.
        lowest, highest: CUDA compute capability.
        head_size: the largest for which the row holds.
    """

    kernel: str
    forward: float
    backward: float
    source: str
    element: int = 2
    lowest: float = 0.0
    highest: float = 99.0
    head_size: int = 512


@cache
def rates() -> list[AttentionRate]:
    """The catalog's rows; the first that fits counts."""
    return [AttentionRate(**row) for row in catalog_tables()["attention"]]


def attention_kernel(device: Hardware, implementation: str | None, element: int, masked: bool) -> str:
    """The kernel that an `attn_implementation` runs.

    Args:
        element: bytes of a query's element.
        masked: by a tensor.
    """
    if device.backend != "cuda":
        return OTHER
    if flash := flash_attention(implementation):
        return flash
    if element == 4 or device.capability < 8:
        return EFFICIENT
    if 9 <= device.capability < 11:
        return CUDNN
    return EFFICIENT if masked else "flash_attention_2"


def attention_rate(device: Hardware, kernel: str, element: int, head_size: int, keys: int, backward: bool) -> float:
    """The share of a device's 16-bit rate that an attention kernel reaches.

    Args:
        keys: that a query sees.
    """
    wide = 4 if element > 2 else 2  # only the memory-efficient kernel has rows for 32 bits
    fitting = [row for row in _rows(device, kernel, wide if kernel == EFFICIENT else 2) if head_size <= row.head_size]
    # For larger heads than a kernel has torch takes the memory-efficient one.
    row = (fitting or _rows(device, EFFICIENT, wide))[0]
    return (row.backward if backward else row.forward) * keys / (keys + HALF)


def _rows(device: Hardware, kernel: str, element: int) -> list[AttentionRate]:
    """A kernel's rows for a device, by head size."""
    own = (row for row in rates() if row.kernel == kernel and row.element == element)
    return [row for row in own if row.lowest <= device.capability <= row.highest]
