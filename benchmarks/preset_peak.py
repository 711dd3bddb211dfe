"""Peaks of presets beside a plain Trainer's, at the preset's effective batch: python benchmarks/preset_peak.py

The embedded pretraining job (4.2 million weights, 128 tokens) on the CPU's allocator. A plain Trainer takes the whole
effective batch at once, in fp32, as a script without settings does; beside it, one with the preset's micro-batch.
"""

import functools
import tempfile

from embedded_run import data, make_model
from jobs import QUIET, trained_peak
from record import record
from transformers import default_data_collator

from hf_memopt import MemoryArguments, MemoryTrainer, get_preset
from hf_memopt.estimator.accounting.profiled_peak import allocator_peak

PRESETS = ("cpu", "rtx_3060", "rtx_4090", "t4", "a100_80gb")
LEVERS = {"loss_chunk_size": 128}


@functools.cache
def plain_peak(micro: int, accumulation: int = 1) -> int:
    """Bytes of a plain Trainer."""
    fields = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": accumulation}
    return trained_peak(make_model, fields, data()[0])


def preset_peak(preset, memory: dict) -> int:
    """Bytes of a MemoryTrainer with a preset's settings."""

    def train() -> None:
        with tempfile.TemporaryDirectory() as folder:
            args = preset.training_arguments(folder, world_size=1, **QUIET)
            parts = {"train_dataset": data()[0], "data_collator": default_data_collator}
            MemoryTrainer(make_model(), args, **parts, memory_args=MemoryArguments(**memory)).train()

    return allocator_peak(train)


def main() -> None:
    data()
    rows = []
    for name in PRESETS:
        preset = get_preset(name)
        micro = preset.training_arguments("out", world_size=1, **QUIET).per_device_train_batch_size
        effective = preset.effective_batch_size
        plain, as_small = plain_peak(effective), plain_peak(micro, effective // micro)
        for memory in ({}, LEVERS):
            peak = preset_peak(preset, memory)
            row = {"job": f"preset {name}", "levers": memory, "effective_batch": effective, "micro_batch": micro}
            row |= {"peak_bytes": peak, "plain_bytes": plain, "of_plain": round(peak / plain, 4)}
            rows.append(row | {"of_plain_with_its_micro_batch": round(peak / as_small, 4)})
            print(rows[-1])
    record("preset_peak", rows)


if __name__ == "__main__":
    main()
