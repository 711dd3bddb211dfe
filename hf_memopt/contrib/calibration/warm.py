"""Imported once by the process that every measurement is forked from: imports are most of a small one's time.

Nothing here may start CUDA, which a forked process cannot start again.
"""

import gc
import importlib

from hf_memopt.noise import quiet

quiet()
for module in ("estimator.api", "planner.sketch", "trainer.trainer"):
    importlib.import_module(f"hf_memopt.{module}")
importlib.import_module("peft")
for name in ("Trainer", "TrainingArguments", "AutoModelForCausalLM", "default_data_collator"):
    getattr(importlib.import_module("transformers"), name)  # lazily imported
# Every Trainer collects all garbage when it begins; to look through all of these modules' objects takes seconds.
gc.collect()
gc.freeze()
