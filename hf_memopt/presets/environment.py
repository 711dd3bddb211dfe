"""Environment variables of presets: what libraries read when they start, and what belongs to one run.

A process may build several presets. What one of them has set must not look to the next as if the user or a launcher
had set it.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from unittest import mock

from hf_memopt.hardware.allocator import VARIABLE, configure_allocator

# accelerate's precision: read when TrainingArguments are made, and by get_preset as what a launcher has said.
PRECISION = "ACCELERATE_MIXED_PRECISION"
# Read again when a Trainer prepares its model, and by fp8 runs alone: it misleads no other preset.
_READ_LATE = "ACCELERATE_FP8_BACKEND"
_set_here: dict[str, str] = {}


def set_for_libraries(variables: Mapping[str, str]) -> None:
    """Set what is not set yet, and take back what a preset before set and this one does not want."""
    for name in _set_here.keys() - variables.keys():
        if os.environ.get(name) == _set_here.pop(name):
            del os.environ[name]
    for name, value in variables.items():
        if name == VARIABLE:
            configure_allocator()
        elif name == _READ_LATE:
            os.environ[name] = value
        elif name != PRECISION and name not in os.environ:
            os.environ[name] = _set_here[name] = value


def precision_set(variables: Mapping[str, str]) -> AbstractContextManager:
    """While it lasts, accelerate's precision is the preset's; a launcher may have said another."""
    return mock.patch.dict(os.environ, {name: value for name, value in variables.items() if name == PRECISION})
