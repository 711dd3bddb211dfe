"""Trace a vision tower's windows in a few groups instead of thousands of attention calls.

Vision towers attend within frames and windows, one call each. As long as attention stores no scores, the tensors of a
layer add up to the same size however many calls there are.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hf_memopt.estimator.patches.replacement import original, replaced
from hf_memopt.stack.versions import has

_MOST = 16  # groups that are traced


@contextmanager
def fewer_windows(attn_implementation: str | None) -> Iterator[None]:
    """Merge the windows of all imported models into a few groups; not for eager attention, which stores scores, nor
    for flash attention, which attends to all in one call."""
    exact = attn_implementation == "eager" or "flash" in (attn_implementation or "")
    with ExitStack() as stack:
        for name in ("get_vision_attention_seqlens", "get_vision_window_index"):
            path = f"transformers.vision_utils:{name}"
            if not has("transformers", "5.15"):
                break  # each model has its own code, traced as it is
            compute = original(path)
            grouped = _grouped(compute)
            for module_name, module in list(sys.modules.items()):
                # Each model has imported the function by name, and calls its own copy.
                imports = module_name.startswith("transformers.models.") and vars(module).get(name) is compute
                if imports and not exact:
                    stack.enter_context(replaced(path, grouped, importer=module))
        yield


def _grouped(function):
    def compute_groups(*args, **kwargs):
        return tuple(_merge(result) if _are_bounds(result) else result for result in function(*args, **kwargs))

    return compute_groups


def _are_bounds(result) -> bool:
    """True if a result is cumulative sequence lengths (cu_seqlens, int32), of more windows than are traced."""
    return isinstance(result, torch.Tensor) and result.dtype is torch.int32 and len(result) > _MOST + 1


def _merge(bounds: torch.Tensor) -> torch.Tensor:
    step = -(-(len(bounds) - 1) // _MOST)
    return torch.cat([bounds[:-1:step], bounds[-1:]])
