"""Peaks of presets beside a plain Trainer's, at the preset's effective batch: python benchmarks/preset_peak.py

The embedded pretraining job (4.2 million weights, 128 tokens) on the CPU's allocator. A plain Trainer takes the whole
effective batch at once, in fp32, as a script without settings does; beside it, one with the preset's micro-batch.
"""

import functools
import tempfile

from embedded_run import data
from record import record
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_memopt import MemoryArguments, MemoryTrainer, get_preset
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.estimator.accounting.profiled_peak import allocator_peak

PRESETS = ("cpu", "rtx_3060", "rtx_4090", "t4", "a100_80gb")
LEVERS = {"loss_chunk_size": 128}
QUIET = {
    "max_steps": 2,
    "report_to": "none",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "save_strategy": "no",
    "use_cpu": True,
}


def peak_of(fields: dict | None, preset=None, memory: dict | None = None) -> int:
    """Bytes: the allocator's peak over two steps, the model included."""

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            if preset is None:
                args = TrainingArguments(folder, **QUIET, **fields)
            else:
                args = preset.training_arguments(folder, world_size=1, **QUIET)
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(builtin_model()))
            given = {"model": model, "args": args, "train_dataset": data()[0], "data_collator": default_data_collator}
            trainer = (
                Trainer(**given)
                if preset is None
                else MemoryTrainer(**given, memory_args=MemoryArguments(**(memory or {})))
            )
            trainer.train()

    return allocator_peak(train)


def main() -> None:
    data()
    whole_batch = functools.cache(lambda samples: peak_of({"per_device_train_batch_size": samples}))
    rows = []
    for name in PRESETS:
        preset = get_preset(name)
        micro = preset.training_arguments("out", world_size=1, **QUIET)
        micro = micro.per_device_train_batch_size
        effective = preset.effective_batch_size
        plain = whole_batch(effective)
        as_small = peak_of({"per_device_train_batch_size": micro, "gradient_accumulation_steps": effective // micro})
        for memory in ({}, LEVERS):
            peak = peak_of(None, preset, memory)
            rows.append(
                {
                    "job": f"preset {name}",
                    "levers": memory,
                    "effective_batch": effective,
                    "micro_batch": micro,
                    "peak_bytes": peak,
                    "plain_bytes": plain,
                    "of_plain": round(peak / plain, 4),
                    "of_plain_with_its_micro_batch": round(peak / as_small, 4),
                }
            )
            print(rows[-1])
    record("preset_peak", "python benchmarks/preset_peak.py", rows)


if __name__ == "__main__":
    main()
