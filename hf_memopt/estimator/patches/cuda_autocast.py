"""Autocast as it is on CUDA, for jobs that are traced on the CPU, where its list of fp32 operators is another one.

On CUDA layer norms, softmax and powers are computed in fp32 and give fp32 results; on the CPU they stay in bf16, so
that GPT-2's activation function alone would seem to need half of what it does. The lists are AT_FORALL_FP32 and
AT_FORALL_FP32_SET_OPT_DTYPE of ATen/autocast_mode.h.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

_COMPUTED = (
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log2",
    "log1p",
    "reciprocal",
    "rsqrt",
    "sinh",
    "tan",
    "pow",
    "softplus",
    "layer_norm",
    "group_norm",
    "cosine_similarity",
    "poisson_nll_loss",
    "cosine_embedding_loss",
    "nll_loss",
    "hinge_embedding_loss",
    "kl_div",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "mse_loss",
    "margin_ranking_loss",
    "multilabel_margin_loss",
    "soft_margin_loss",
    "triplet_margin_loss",
    "multi_margin_loss",
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "dist",
    "cdist",
    "renorm",
    "logsumexp",
    "prod",
    "softmax",
    "log_softmax",
    "cumprod",
    "cumsum",
    "sum",
    "norm",
)


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """Compute in fp32 what CUDA's autocast does, wherever autocast is on.

    (A TorchFunctionMode would not do: it is not in force where backward computes a checkpointed layer again.)
    """
    with ExitStack() as patches:
        for home in (torch, torch.nn.functional, torch.Tensor):
            for name in (*_COMPUTED, "__pow__", "__rpow__"):
                if hasattr(home, name):
                    patches.enter_context(mock.patch.object(home, name, _in_fp32(getattr(home, name))))
        yield


def _in_fp32(function):
    def compute(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu") or kwargs.get("dtype"):
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False):
            return function(*map(_wide, args), **{name: _wide(value) for name, value in kwargs.items()})

    return compute


def _wide(value):
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
