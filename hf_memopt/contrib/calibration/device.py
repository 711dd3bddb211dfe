"""A device's constants, measured: context, cuBLAS workspace, rates; and whether its settings are taken."""

import dataclasses
import tempfile
import time
from typing import Any

from hf_memopt.contrib.calibration.readings import accelerator, driver_bytes, synchronize, this_card
from hf_memopt.contrib.calibration.training import Setting, make_trainer
from hf_memopt.units import MIB

_WARM_UP = 3  # calls before the timed ones: libraries choose and load their kernels in the first
_LONGEST = 2.0  # seconds for one rate: a card that emulates bf16 takes a second for one large matmul


def context_and_workspace(setting: Setting) -> dict[str, Any]:
    """Bytes that the device holds beside the allocator's after a training job, and of cuBLAS's workspace.

    Must be the first in its process to use the device.

    Args:
        setting: a small job, which loads every kernel that a step needs.
    """
    import torch

    kind = accelerator()
    if kind == "cpu":
        _train(setting)
        return {"context_bytes": None, "workspace_bytes": None}
    if kind == "mps":
        _train(setting)
        torch.mps.synchronize()
        torch.mps.empty_cache()
        overhead = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
        return {"context_bytes": overhead, "workspace_bytes": None}
    idle = driver_bytes()
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    card = this_card(idle)
    after_first = _beside(idle, card)
    workspace = _workspace()
    _train(setting)
    torch.cuda.synchronize()
    return {
        "context_at_first_tensor_bytes": after_first,
        "context_bytes": _beside(idle, card),
        "workspace_bytes": workspace,
        "idle_bytes": idle.get(card),
        "card": card,
    }


def _beside(idle: dict[str, int], card: str) -> int | None:
    """Bytes that this process has of its card beside the allocator's; None where the driver does not tell."""
    import torch

    used = driver_bytes().get(card)
    return None if used is None or card not in idle else used - idle[card] - torch.cuda.memory_reserved()


def _workspace() -> int:
    """Bytes that the first matrix multiplication leaves allocated."""
    import torch

    left = torch.ones(1024, 1024, device="cuda", dtype=torch.float16)
    out = torch.empty_like(left)
    before = torch.cuda.memory_allocated()
    torch.mm(left, left, out=out)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def _train(setting: Setting) -> None:
    with tempfile.TemporaryDirectory() as folder:
        make_trainer(setting, folder, 2).train()


def rates(size: int = 8192, copied: int = 1024 * MIB) -> dict[str, Any]:
    """Rates that one kernel reaches: of a matmul in each dtype, of a copy on the device and from the host, and of
    launches.

    Args:
        size: of the square matrices.
        copied: bytes.
    """
    import torch

    kind = accelerator()
    matmuls = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        try:
            left, right = (torch.randn(size, size, device=kind, dtype=torch.float32).to(dtype) for _ in range(2))
            out = torch.empty_like(left)
            product = lambda left=left, right=right, out=out: torch.mm(left, right, out=out)  # noqa: E731
            matmuls[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds_per_call(product)
        except (RuntimeError, TypeError):  # MPS before macOS 14 has no bf16
            continue
    source = torch.empty(copied, dtype=torch.uint8, device=kind)
    target = torch.empty_like(source)
    bandwidth = 2 * copied / seconds_per_call(lambda: target.copy_(source))
    link = None
    if kind == "cuda":
        host = torch.empty(copied // 4, dtype=torch.uint8, pin_memory=True)
        link = host.nbytes / seconds_per_call(lambda: target[: host.nbytes].copy_(host, non_blocking=True))
    small = torch.ones(1, device=kind)
    return {
        "matmul_flops_per_second": matmuls,
        "bandwidth_bytes_per_second": bandwidth,
        "host_link_bytes_per_second": link,
        "launch_seconds": seconds_per_call(lambda: small.add_(1), 2000),
    }


def seconds_per_call(function, times: int = 20) -> float:
    """Mean seconds of a call on the device, after some that warm it up; of fewer calls where they take long."""
    for _ in range(_WARM_UP):
        function()
    synchronize()
    began = time.perf_counter()
    function()
    synchronize()
    times = max(1, min(times, int(_LONGEST / (time.perf_counter() - began))))
    began = time.perf_counter()
    for _ in range(times):
        function()
    synchronize()
    return (time.perf_counter() - began) / times


def attention(setting: Setting) -> dict[str, str]:
    """The implementation that resolve_attention() chooses, after a model has trained with it."""
    from hf_memopt.hardware import detect, resolve_attention

    chosen = resolve_attention(detect())
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(dataclasses.replace(setting, attention=chosen), folder, 2)
        trainer.train()
    return {"chosen": chosen, "ran": trainer.model.config._attn_implementation}


def allocator_setting() -> dict[str, Any]:
    """PYTORCH_ALLOC_CONF set in the process before CUDA starts: whether the allocator took it."""
    from hf_memopt.hardware import configure_allocator

    setting = configure_allocator()
    import torch

    if not torch.cuda.is_available():
        return {"setting": setting, "expandable": None}
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    segments = torch.cuda.memory_snapshot()
    return {
        "setting": setting,
        "bytes": block.nbytes,
        "expandable": all(segment.get("is_expandable") for segment in segments),
    }
