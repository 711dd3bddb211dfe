"""Vision towers attend within frames and windows, one call each: thousands, which take as much as a few larger ones.

The tensors of a layer's pieces add up to the same, whatever their number, as long as attention keeps no scores.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hf_memopt.estimator.patches.replacement import original, replaced

_MOST = 16  # groups that are traced


@contextmanager
def fewer_windows(attn_implementation: str | None) -> Iterator[None]:
    """Have the models that are loaded see their windows in a few groups."""
    with ExitStack() as stack:
        for name in ("get_vision_attention_seqlens", "get_vision_window_index"):
            path = f"transformers.vision_utils:{name}"
            compute = original(path)
            grouped = _grouped(compute)
            for module_name, module in list(sys.modules.items()):
                # Models import the function by name, so each holds it itself; eager attention keeps scores of windows.
                imports = module_name.startswith("transformers.models.") and vars(module).get(name) is compute
                if imports and attn_implementation != "eager":
                    stack.enter_context(replaced(path, grouped, importer=module))
        yield


def _grouped(function):
    def of_groups(*args, **kwargs):
        return tuple(_joined(found) if _are_bounds(found) else found for found in function(*args, **kwargs))

    return of_groups


def _are_bounds(found) -> bool:
    """Whether a tensor says where each piece begins and ends."""
    return isinstance(found, torch.Tensor) and found.dtype is torch.int32 and len(found) > _MOST + 1


def _joined(bounds: torch.Tensor) -> torch.Tensor:
    step = -(-(len(bounds) - 1) // _MOST)
    return torch.cat([bounds[:-1:step], bounds[-1:]])
