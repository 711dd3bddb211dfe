"""Optimizer states and step in host memory, for one device: gradients are copied there, updated weights back.

For several devices DeepSpeed does this (the zero2_offload_cpu and zero3_offload_cpu strategies). The host keeps a copy
of the weights beside the states, in the weights' dtype.

torchao 0.18's CPUOffloadOptimizer overlaps transfers with the backward pass, but does not fit the Trainer. Its hook
copies each gradient to the host during the backward pass, so clipping (max_grad_norm=1.0 by default), which comes
after, scales gradients that the step no longer reads. With accumulation it copies every micro-batch's. It needs CUDA
or XPU when constructed, so an estimate cannot trace it, and it keeps one optimizer per weight, whose state_dict() is
not that of a torch optimizer.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

logger = logging.getLogger(__name__)


def keep_on_host(
    optimizer,
    is_apart: Callable[[torch.Tensor], bool] | None = None,
    booking: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Replace an optimizer's weights by copies in host memory; it must not have taken a step yet.

    Args:
        is_apart: whether a weight is on a device with discrete memory; where none is, nothing changes, with a warning.
        booking: context in which host memory is allocated; the estimator accounts for it there.
    """
    apart = is_apart or (lambda weight: weight.device.type not in ("cpu", "mps"))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not any(map(apart, weights)):
        logger.warning("optimizer_cpu_offload does nothing here: the optimizer is in host memory already")
        return
    with booking():
        copies = {weight: _on_host(weight) for weight in weights if apart(weight)}
        gradients = {weight: torch.empty_like(copy, pin_memory=copy.is_pinned()) for weight, copy in copies.items()}
    if hasattr(optimizer, "follow"):  # Adam-mini keeps its blocks per weight
        optimizer.follow(copies)
    for group in optimizer.param_groups:
        group["params"] = [copies.get(weight, weight) for weight in group["params"]]

    @torch.no_grad()
    def fetch_gradients(*_) -> None:
        for weight, copy in copies.items():
            copy.grad = None if weight.grad is None else gradients[weight].copy_(weight.grad, non_blocking=True)
        _wait(weights[0].device)

    @torch.no_grad()
    def return_weights(*_) -> None:
        for weight, copy in copies.items():
            if weight.grad is not None:
                weight.copy_(copy, non_blocking=True)

    optimizer.register_step_pre_hook(fetch_gradients)
    optimizer.register_step_post_hook(return_weights)


def _on_host(weight: torch.Tensor) -> torch.nn.Parameter:
    pinned = weight.device.type != "cpu"
    copy = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=pinned).copy_(weight.detach())
    return torch.nn.Parameter(copy)


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
