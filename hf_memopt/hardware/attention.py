"""Which attention implementation runs here: flash_attention_3, else flash_attention_2, else sdpa, never silently."""

import importlib
import logging
from functools import cache

from hf_memopt.errors import InputError, one_line
from hf_memopt.hardware.catalog import Hardware

logger = logging.getLogger(__name__)

# Name in transformers -> (module of its extension, package to install, least and greatest compute capability).
# FlashAttention-3 is built for Hopper alone, FlashAttention-2 for Ampere and later (the projects' READMEs).
_FLASH = {
    "flash_attention_3": ("flash_attn_interface", "flash_attn_3", 9.0, 9.9),
    "flash_attention_2": ("flash_attn", "flash-attn", 8.0, 12.9),
}


def resolve_attention(hardware: Hardware, requested: str | None = None) -> str:
    """The `attn_implementation` to load a model with.

    Args:
        hardware: the device that the model will train on.
        requested: a name the user insists on; it is checked, not replaced.

    Raises:
        InputError: the requested flash attention cannot be used here.
    """
    if requested:
        if requested in _FLASH and (reason := _obstacle(requested, hardware)):
            raise InputError(
                f"attn_implementation={requested!r} cannot be used: {reason}; use attn_implementation='sdpa'"
            )
        return requested
    reasons = []
    for name in _FLASH:
        reason = _obstacle(name, hardware)
        if not reason:
            _announce(f"attention: {name}")
            return name
        reasons.append(reason)
    _announce(f"attention: sdpa, not flash attention ({'; '.join(dict.fromkeys(reasons))})")
    return "sdpa"


def _obstacle(name: str, hardware: Hardware) -> str:
    """Why a flash attention cannot be used on a device, "" where it can."""
    module, package, least, greatest = _FLASH[name]
    if hardware.backend != "cuda":
        return f"{hardware.label} is not an NVIDIA card"
    if not least <= float(hardware.architecture) <= greatest:
        return f"{hardware.label} has compute capability {hardware.architecture}, it needs {least} to {greatest}"
    return _import_error(module, package)


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
