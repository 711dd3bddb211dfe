"""While a script runs, torch, transformers and hf_memopt describe the device that the estimate is for.

Tensors stay on the CPU. No accelerator is started: every question about it is answered from the catalog.
"""

import contextlib
import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from hf_memopt.hardware import Hardware, allocator, detection

# Functions of transformers and accelerate that remember what they have found out about the device, or did to it.
_ASKING = r"is_(torch_|mps|xpu|bf16|fp8|flash)|check_cuda|enable_tf32"
_ACCELERATORS = ("cuda", "mps", "xpu")
_CUDA_SIZES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_CUDA_ACTIONS = (
    "empty_cache",
    "init",
    "ipc_collect",
    "manual_seed",
    "manual_seed_all",
    "reset_max_memory_allocated",
    "reset_peak_memory_stats",
    "seed",
    "seed_all",
    "set_device",
    "set_per_process_memory_fraction",
    "set_rng_state",
    "set_rng_state_all",
    "synchronize",
)


@contextlib.contextmanager
def seen_by_script(device: Hardware, count: int = 1) -> Iterator[None]:
    """Let a script see a machine's devices.

    Args:
        device: of the catalog, or this machine's.
        count: of this machine.
    """
    with contextlib.ExitStack() as stack:
        for owner, answers in _answers(device, count):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(mock.patch.object(owner, name, answer))
        with (
            mock.patch.object(detection, "detect", lambda: device),
            mock.patch.object(allocator, "_build_has_cuda_allocator", lambda: device.backend == "cuda"),
            # DeepSpeed looks for its accelerator once, when it is imported, and the trace needs the CPU's.
            mock.patch.dict(os.environ, {"DS_ACCELERATOR": "cpu"}),
            _asked_anew(),
            contextlib.nullcontext() if device.backend == "cpu" else _OnCpu(),
        ):
            yield


@contextlib.contextmanager
def _asked_anew() -> Iterator[None]:
    """Forget what transformers and accelerate remember of this machine's device, and of the other one afterwards, with
    the TF32 that TrainingArguments switched on for it."""
    from accelerate.utils import environment, imports
    from transformers.utils import import_utils

    def forget() -> None:
        for module in (import_utils, imports, environment):
            for name, function in vars(module).items():
                if re.match(_ASKING, name) and hasattr(function, "cache_clear"):
                    function.cache_clear()

    precision = torch.backends.fp32_precision
    forget()
    try:
        yield
    finally:
        forget()
        torch.backends.fp32_precision = precision


class Stream:
    """A stream, and the events on it, where everything is done at once."""

    def __init__(self, *args, **kwargs):
        pass

    def wait_event(self, *others) -> None:
        pass

    wait_stream = synchronize = wait_event

    def record_event(self):
        return self


class _OnCpu(TorchFunctionMode):
    """Tensors that are made on, or moved to, an accelerator stay on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _stand_in(kwargs["device"])
        if func is torch.Tensor.to:
            args = (args[0], *map(_stand_in, args[1:]))
        return func(*args, **kwargs)


def _stand_in(device):
    """The CPU for an accelerator, given as a torch.device, a name or an index; anything else as it is."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return "cpu"
    kind = device.type if isinstance(device, torch.device) else device.split(":")[0] if isinstance(device, str) else ""
    return torch.device("cpu") if kind in _ACCELERATORS else device


def _answers(device: Hardware, count: int) -> list[tuple[Any, dict[str, Any]]]:
    """(module, its functions and values) as they are where the device is."""
    on_cuda, on_mps = device.backend in ("cuda", "rocm"), device.backend == "mps"
    absent = {"is_available": _always(False), "device_count": _always(0)}
    name = "cuda" if on_cuda else device.backend
    return [
        (torch.cuda, _cuda_answers(device, count) if on_cuda else absent),
        (torch.backends.mps, dict.fromkeys(("is_available", "is_built", "is_macos_or_newer"), _always(on_mps))),
        (torch.mps, _mps_answers(device) if on_mps else {}),
        (torch.xpu, _xpu_answers(device, count) if device.backend == "xpu" else absent),
        (
            torch.accelerator,
            {
                "is_available": _always(device.backend != "cpu"),
                "device_count": _always(count * (device.backend != "cpu")),
                "current_accelerator": _always(None if name == "cpu" else torch.device(name)),
            },
        ),
        (torch, {"set_default_device": _always(None)}),
        # The build that the device needs: libraries only ask whether there is a version.
        (
            torch.version,
            {
                "cuda": (torch.version.cuda or "13.0") if device.backend == "cuda" else None,
                "hip": (torch.version.hip or "7.0") if device.backend == "rocm" else None,
            },
        ),
    ]


def _always(value):
    return lambda *args, **kwargs: value


def _cuda_answers(device: Hardware, count: int) -> dict[str, Any]:
    # What torch.cuda.get_device_properties() answers, as far as the catalog knows it.
    if device.backend == "rocm":
        # gfx942 is 9.4, gfx1100 is 11.0: the last two digits are minor version and stepping.
        major, minor = re.match(r"gfx(\d+)(\d)\w$", device.architecture).groups()
    else:
        major, minor = device.architecture.split(".")
    properties = SimpleNamespace(
        name=_reported_name(device),
        major=int(major),
        minor=int(minor),
        total_memory=device.memory,
        gcnArchName=device.architecture if device.backend == "rocm" else "",
        is_integrated=device.unified_memory,
        is_multi_gpu_board=False,
        warp_size=64 if device.architecture.startswith("gfx9") else 32,
        multi_processor_count=None,  # the catalog does not know it
    )
    return {
        **dict.fromkeys(_CUDA_ACTIONS, _always(None)),
        **dict.fromkeys(_CUDA_SIZES, _always(0)),
        "Stream": Stream,
        "is_available": _always(True),
        "is_initialized": _always(False),
        "device_count": _always(count),
        "current_device": _always(0),
        "get_device_name": _always(properties.name),
        "get_device_capability": _always((properties.major, properties.minor)),
        "get_device_properties": _always(properties),
        "get_arch_list": _always([f"sm_{properties.major}{properties.minor}"]),
        # As torch.cuda has it: by default cards that emulate bfloat16 support it, too.
        "is_bf16_supported": lambda including_emulation=True: device.native_bf16 or including_emulation,
        "is_tf32_supported": _always(device.backend == "cuda" and properties.major >= 8),
        "mem_get_info": _always((device.memory, device.memory)),
        "memory_stats": _always({}),
        "memory_summary": _always(""),
        "get_rng_state": _always(torch.zeros(16, dtype=torch.uint8)),
        "get_rng_state_all": _always([]),
    }


def _reported_name(device: Hardware) -> str:
    """The name that the driver reports: the catalog's pattern of it where that is plain text, else the label."""
    text = re.sub(r"\[(\w)\w*\]", r"\1", device.reported)  # one of several letters
    return f"{device.vendor.upper()} {text}" if re.fullmatch(r"[\w -]+", text) else device.label


def _xpu_answers(device: Hardware, count: int) -> dict[str, Any]:
    properties = SimpleNamespace(
        name=_reported_name(device),
        total_memory=device.memory,
        local_mem_size=not device.unified_memory,
        has_bfloat16_conversions=device.native_bf16,
        architecture=device.architecture,
    )
    return {
        **dict.fromkeys(_CUDA_ACTIONS, _always(None)),
        **dict.fromkeys(_CUDA_SIZES, _always(0)),
        "Stream": Stream,
        "is_available": _always(True),
        "device_count": _always(count),
        "current_device": _always(0),
        "get_device_name": _always(properties.name),
        "get_device_properties": _always(properties),
        "is_bf16_supported": _always(device.native_bf16),
        "mem_get_info": _always((device.memory, device.memory)),
    }


def _mps_answers(device: Hardware) -> dict[str, Any]:
    return {
        **dict.fromkeys(("current_allocated_memory", "driver_allocated_memory"), _always(0)),
        **dict.fromkeys(("empty_cache", "synchronize", "manual_seed", "seed", "set_rng_state"), _always(None)),
        "device_count": _always(1),
        "recommended_max_memory": _always(device.memory),
        "get_rng_state": _always(torch.zeros(16, dtype=torch.uint8)),
    }
