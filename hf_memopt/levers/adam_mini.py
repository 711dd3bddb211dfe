"""Adam-mini: Adam with one second moment per block of weights instead of per weight, which halves Adam's states.

Blocks follow Zhang et al., "Adam-mini: Use Fewer Learning Rates To Gain More" (arXiv 2406.16793): a token's
row of embedding and head, an attention head of queries and keys, an output neuron of other matrices, a whole vector.
"""

import math
from typing import Any

import torch

_PER_HEAD = ("q_proj", "k_proj", "query", "key", "wq", "wk", "qkv_proj", "query_key_value", "qkv", "Wqkv")


def weight_blocks(model: torch.nn.Module) -> dict[torch.nn.Parameter, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Weight -> the shape to view it in, and the dimensions of that view that form a block."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    blocks = {}
    for name, module in model.named_modules():
        for weight in module.parameters(recurse=False):
            blocks.setdefault(weight, _blocks(name.split("."), type(module).__name__, tuple(weight.shape), size))
    return blocks


def settings_for(model: torch.nn.Module, args) -> dict[str, Any]:
    """Keyword arguments of AdamMini, from TrainingArguments' Adam settings and the model's blocks."""
    betas = (args.adam_beta1, args.adam_beta2)
    return {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon, "blocks": weight_blocks(model)}


def _blocks(path: list[str], kind: str, shape: tuple[int, ...], head: int | None):
    if len(shape) < 2:
        return shape, tuple(range(len(shape)))
    if kind == "Conv1D":  # GPT-2's: weights are (inputs, outputs), so a neuron is a column
        return shape, (0,)
    if head and any(part in _PER_HEAD for part in path) and len(shape) == 2 and shape[0] % head == 0:
        return (shape[0] // head, head, shape[1]), (1, 2)
    return shape, (len(shape) - 1,)


class AdamMini(torch.optim.Optimizer):
    """AdamW with the second moment averaged over each block.

    Args:
        params: as for every torch optimizer.
        blocks: as weight_blocks() returns them; other weights have one block per row.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; the decay is decoupled.
    """

    def __init__(
        self, params, blocks=None, lr: float = 1e-3, betas=(0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._blocks = blocks or {}

    def follow(self, copies: dict[torch.nn.Parameter, torch.nn.Parameter]) -> None:
        """Give copies of weights, which will be updated instead of them, the weights' blocks."""
        self._blocks |= {copies[weight]: blocks for weight, blocks in self._blocks.items() if weight in copies}

    def load_state_dict(self, state_dict) -> None:
        # This casts states to their weight's dtype; the second moment is restored in fp32 below.
        super().load_state_dict(state_dict)
        weights = [weight for group in self.param_groups for weight in group["params"]]
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        for weight, number in zip(weights, numbers, strict=True):
            if number in state_dict["state"]:
                square = state_dict["state"][number]["exp_avg_sq"]
                self.state[weight]["exp_avg_sq"] = square.to(weight.device, copy=True)

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)
        return loss

    def _update(self, weight, group) -> None:
        shape, within = self._blocks.get(weight) or _blocks([], "", tuple(weight.shape), None)
        state = self.state[weight]
        if not state:
            reduced = [1 if dim in within else size for dim, size in enumerate(shape)]
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(weight)
            state["exp_avg_sq"] = torch.zeros(reduced, dtype=torch.float32, device=weight.device)
        state["step"] += 1
        (slow, slower), step = group["betas"], state["step"]
        gradient, mean, square = weight.grad, state["exp_avg"], state["exp_avg_sq"]
        size = math.prod(shape[dim] for dim in within)
        norm = torch.linalg.vector_norm(gradient.view(shape), dim=within, keepdim=True) if within else gradient.abs()
        square.mul_(slower).add_(norm.float().square_(), alpha=(1 - slower) / size)
        mean.lerp_(gradient, 1 - slow)
        if group["weight_decay"]:
            weight.mul_(1 - group["lr"] * group["weight_decay"])
        scale = (square / (1 - slower**step)).sqrt_().add_(group["eps"]).to(weight.dtype)
        weight.view(shape).addcdiv_(mean.view(shape), scale, value=-group["lr"] / (1 - slow**step))
