"""Keep optimizer states in host memory and step on the CPU, for a single device: gradients are copied to the host,
updated weights back.

With several devices DeepSpeed does this (strategies zero2_offload_cpu and zero3_offload_cpu). The host keeps a copy of
the weights, in their own dtype, beside the states.

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
    has_discrete_memory: Callable[[torch.Tensor], bool] | None = None,
    counting: Callable[[], AbstractContextManager] = nullcontext,
) -> None:
    """Move a torch optimizer that has not stepped yet to copies of its weights in host memory.

    Args:
        has_discrete_memory: of a weight's device. Where no weight's has, only a warning is logged.
        counting: a context for the allocations of host memory.
    """
    is_on_device = has_discrete_memory or (lambda weight: weight.device.type not in ("cpu", "mps"))
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    if not any(map(is_on_device, weights)):
        logger.warning("optimizer_cpu_offload has no effect here: the optimizer is in host memory already")
        return
    with counting():
        copies = {weight: torch.nn.Parameter(_on_host(weight)) for weight in weights if is_on_device(weight)}
        gradients = {weight: torch.empty_like(copy, pin_memory=copy.is_pinned()) for weight, copy in copies.items()}
        _move_states(optimizer, copies)
    if hasattr(optimizer, "follow"):  # Adam-mini keys its blocks by weight
        optimizer.follow(copies)
    for group in optimizer.param_groups:
        group["params"] = [copies.get(weight, weight) for weight in group["params"]]

    @torch.no_grad()
    def fetch_gradients(*_) -> None:
        for weight, copy in copies.items():
            copy.grad = None if weight.grad is None else gradients[weight].copy_(weight.grad, non_blocking=True)
        if (device := weights[0].device).type != "cpu":
            torch.get_device_module(device).synchronize(device)

    @torch.no_grad()
    def return_weights(*_) -> None:
        for weight, copy in copies.items():
            if weight.grad is not None:
                weight.copy_(copy, non_blocking=True)

    optimizer.register_step_pre_hook(fetch_gradients)
    optimizer.register_step_post_hook(return_weights)


def _move_states(optimizer, copies: dict[torch.Tensor, torch.nn.Parameter]) -> None:
    """Give the copies the states that an optimizer made when it was constructed, as Adagrad does."""
    for weight, copy in copies.items():
        if weight in optimizer.state:
            state = optimizer.state.pop(weight)
            optimizer.state[copy] = {
                name: _on_host(value) if isinstance(value, torch.Tensor) else value for name, value in state.items()
            }


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    pinned = tensor.device.type != "cpu"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor.detach())
