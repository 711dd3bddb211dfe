"""Imported once by the process that every case is forked from: imports are most of a small case's time.

Nothing here may start CUDA, which a forked process cannot start again.
"""

import gc

import accelerate
import peft
import transformers

import hf_memopt.estimator.api
import hf_memopt.planner.sketch
import hf_memopt.trainer.trainer

__all__ = ["accelerate", "hf_memopt", "peft", "transformers"]
for name in ("Trainer", "TrainingArguments", "AutoModelForCausalLM", "default_data_collator"):
    getattr(transformers, name)  # lazily imported
# Every Trainer collects all garbage when it begins; to look through all of these modules' objects takes seconds.
gc.collect()
gc.freeze()
