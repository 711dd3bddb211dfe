"""Rules of which optimizers, engines, devices and quantizations work together; if not, why and what to use instead."""

from hf_memopt.compatibility.config_files import check_config_file
from hf_memopt.compatibility.resolve import launched_config_file, launched_strategy, resolve_engine, world_size
from hf_memopt.compatibility.rules import RULES, Rule
from hf_memopt.compatibility.setup import Setup, check, refusals

__all__ = [
    "RULES",
    "Rule",
    "Setup",
    "check",
    "check_config_file",
    "launched_config_file",
    "launched_strategy",
    "refusals",
    "resolve_engine",
    "world_size",
]
