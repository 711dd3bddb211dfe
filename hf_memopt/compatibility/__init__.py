"""Which optimizer × backend × device × quantisation work together; says why not and what instead."""

from hf_memopt.compatibility.config_files import check_config_file
from hf_memopt.compatibility.launch import (
    deepspeed_strategy,
    launched_config_file,
    launched_strategy,
    split_strategy,
    world_size,
)
from hf_memopt.compatibility.rules import RULES, Rule
from hf_memopt.compatibility.setup import Setup, check, refusals

__all__ = [
    "RULES",
    "Rule",
    "Setup",
    "check",
    "check_config_file",
    "deepspeed_strategy",
    "launched_config_file",
    "launched_strategy",
    "refusals",
    "split_strategy",
    "world_size",
]
