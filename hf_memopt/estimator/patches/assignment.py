"""Losses of detection and segmentation: which prediction is matched with which box or mask."""

import sys
from contextlib import AbstractContextManager, nullcontext

from hf_memopt.estimator.private_names import Part

_ASSIGNMENT = Part.DETECTION.replaces(
    "scipy.optimize:linear_sum_assignment",
    why="losses match predictions with targets by the values of their costs",
)


def matched_in_order() -> AbstractContextManager:
    """Match predictions and targets in their order: scipy needs the costs, but how many match follows from shapes."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("transformers.")]
    # Each loss has imported the function by name, where scipy is installed.
    losses = [module for module in modules if "linear_sum_assignment" in vars(module)]
    return _ASSIGNMENT.replaced(losses, linear_sum_assignment=_match_in_order) if losses else nullcontext()


def _match_in_order(costs):
    import numpy

    matches = numpy.arange(min(costs.shape))
    return matches, matches
