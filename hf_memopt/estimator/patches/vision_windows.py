"""Trace a vision tower's windows in a few groups instead of thousands of attention calls.

Vision towers attend within frames and windows, one call each. As long as attention stores no scores, the tensors of a
layer add up to the same size however many calls there are.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hf_memopt.estimator.private_names import Part

_MOST = 16  # groups that are traced
_WINDOWS = Part.VISION.replaces(
    "transformers.vision_utils:get_vision_attention_seqlens(grid_thw, config)",
    "transformers.vision_utils:get_vision_window_index(grid_thw, spatial_merge_size, window_size, patch_size)",
    why="a vision tower makes a call to attention for every window: thousands, traced as a few larger ones",
    until="transformers attends to all windows in one call without flash attention",
    since="5.15",  # before, each model has its own, traced as it is
)


@contextmanager
def fewer_windows(attn_implementation: str | None) -> Iterator[None]:
    """Merge the windows of all imported models into a few groups; not for eager attention, which stores scores, nor
    for flash attention, which attends to all in one call."""
    needed = _WINDOWS.needed and attn_implementation != "eager" and "flash" not in (attn_implementation or "")
    with ExitStack() as stack:
        for name in ("get_vision_attention_seqlens", "get_vision_window_index") if needed else ():
            compute = _WINDOWS.original(name)
            # Each model has imported the function by name, and calls its own copy.
            importers = [
                module
                for path, module in list(sys.modules.items())
                if path.startswith("transformers.models.") and vars(module).get(name) is compute
            ]
            stack.enter_context(_WINDOWS.replaced(importers, **{name: _grouped(compute)}))
        yield


def _grouped(function):
    def compute_groups(*args, **kwargs):
        return tuple(map(_merge, function(*args, **kwargs)))

    return compute_groups


def _merge(result):
    """Merge cumulative sequence lengths (cu_seqlens, int32) of more windows than are traced; leave all else."""
    if not isinstance(result, torch.Tensor) or result.dtype is not torch.int32 or len(result) <= _MOST + 1:
        return result
    step = -(-(len(result) - 1) // _MOST)
    return torch.cat([result[:-1:step], result[-1:]])
