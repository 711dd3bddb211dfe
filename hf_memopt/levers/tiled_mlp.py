"""MLPs over a few tokens at a time: what lies between their matmuls never exists for the whole micro-batch.

An MLP treats each token by itself, and its intermediates are several times as wide as its input. Each tile of tokens
runs under torch's activation checkpointing, so that the backward pass computes the intermediates of one tile again,
and autograd sums the weights' gradients over the tiles. The backward pass repeats all matmuls of the MLP but the last.

Source of the idea: Arctic Long Sequence Training (arXiv 2506.13996), DeepSpeed's TiledMLP (runtime/sequence_parallel),
which needs its own engine for gradients.
"""

import functools
import inspect
import re

import torch
from torch.utils.checkpoint import checkpoint

from hf_memopt.errors import InputError
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace

# transformers names the module after what it is: LlamaMLP, Qwen2_5_VLMLP, GPT2MLP, ViTMlp, T5DenseGatedActDense, …
_NAMED = re.compile(r"(MLP|Mlp|FeedForward|FeedForwardNetwork|FFN|ActDense)$")
_MIXES_TOKENS = (torch.nn.modules.conv._ConvNd, torch.nn.modules.batchnorm._BatchNorm)


def tile_mlps(model: torch.nn.Module, size: int) -> None:
    """Run a model's MLPs over tiles of tokens.

    Args:
        model: a transformers model, or peft's around one.
        size: tokens of a tile, counted over the micro-batch.

    Raises:
        InputError: no layer of the model has its MLP as a module of its own.
    """
    inner = inner_model(model)
    mlps = [module for module in inner.modules() if is_mlp(module)]
    if not mlps:
        raise InputError(
            f"mlp_tile_size={size}: {type(inner).__name__} has no MLP as a module of its own; leave it out"
        )
    for module in mlps:
        _tile(module, size)


def is_mlp(module: torch.nn.Module) -> bool:
    """True if a module treats each token by itself, and takes tokens alone."""
    if (
        not _NAMED.search(type(module).__name__)
        or any(isinstance(part, _MIXES_TOKENS) for part in module.modules())
        or any(name in ("router", "experts") for name, _ in module.named_children())  # GptOssMLP, DbrxFFN
    ):
        return False
    parameters = inspect.signature(type(module).forward).parameters.values()
    # self, tokens
    return len(parameters) == 2 and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _tile(module: torch.nn.Module, size: int) -> None:
    plain = module.forward

    @functools.wraps(plain)
    def tiled(hidden):
        width = hidden.shape[-1]
        if hidden.numel() <= size * width:
            return plain(hidden)
        run = functools.partial(checkpoint, plain, use_reentrant=False) if torch.is_grad_enabled() else plain
        # The backward pass of split() joins the tiles' gradients; that of slices would pad each to full length.
        tiles = [run(tile) for tile in hidden.reshape(-1, width).split(size)]
        return torch.cat(tiles).view(*hidden.shape[:-1], -1)

    replace(module, "forward", tiled)
