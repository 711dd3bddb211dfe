"""Choose a device's attention implementation: flash attention by its version, else sdpa, never silently."""

import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hf_memopt.errors import InputError, one_line
from hf_memopt.hardware.catalog import Hardware

logger = logging.getLogger(__name__)


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
        reason = _obstacle(name, hardware)
        if not reason:
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
    if "/" in name:
        return f"of the hub's kernels only {', '.join(HUB_KERNELS)} are known"
    return ""


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


@cache
def _announce(line: str) -> None:
    logger.warning(line)
