"""Vision towers attend within frames and windows, one call each: thousands, which take as much as a few larger ones.

The tensors of a layer's pieces add up to the same, whatever their number, as long as attention keeps no scores.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

_MOST = 16  # pieces that are traced
_NAMES = ("get_vision_attention_seqlens", "get_vision_window_index")  # of transformers.vision_utils


@contextmanager
def fewer_windows(attn_implementation: str | None) -> Iterator[None]:
    """Have the models that are loaded see their windows in a few groups."""
    with ExitStack() as patches:
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.models.") and attn_implementation != "eager":
                for function in _NAMES:
                    if found := vars(module).get(function):
                        patches.enter_context(mock.patch.object(module, function, _grouped(found)))
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
