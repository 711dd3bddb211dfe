"""What jobs of several benchmarks have in common: they train quietly on the CPU, and their peak is the allocator's."""

import tempfile
from collections.abc import Callable

CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
QUIET = {
    **{"use_cpu": True, "max_steps": 2, "report_to": "none", "disable_tqdm": True},
    **{"logging_strategy": "no", "save_strategy": "no"},
}


def with_checkpointing(fields: dict) -> dict:
    """Fields of a data file, where `activation_checkpointing = true` alone means CHECKPOINTED."""
    return {**CHECKPOINTED, **fields} if fields.get("activation_checkpointing") else fields


def same_rows(length: int, count: int = 32) -> list[dict]:
    """Samples of one token, all alike: memory depends on their length alone."""
    return [{"input_ids": [7] * length, "labels": [7] * length}] * count


def make_trainer(folder: str, model, fields: dict, rows, memory: dict | None = None, kind=None, **more):
    """A Trainer of two steps, if `fields` say nothing else; with fields of MemoryArguments a MemoryTrainer.

    Args:
        kind: the class, where it is another.
        more: arguments of the trainer.
    """
    from transformers import Trainer, TrainingArguments, default_data_collator

    from hf_memopt import MemoryArguments, MemoryTrainer

    args = TrainingArguments(folder, **{**QUIET, **fields})
    parts = {"model": model, "args": args, "train_dataset": rows, "data_collator": default_data_collator, **more}
    if memory is not None:
        kind, parts["memory_args"] = MemoryTrainer, MemoryArguments(**memory)
    return (kind or Trainer)(**parts)


def trained_peak(make_model: Callable, fields: dict, rows, memory: dict | None = None, **more) -> int:
    """Bytes: the allocator's peak over model, steps and all between."""
    from profiled_peak import allocator_peak

    with tempfile.TemporaryDirectory() as folder:
        return allocator_peak(lambda: make_trainer(folder, make_model(), fields, rows, memory, **more).train())


def loaded_bytes(model) -> int:
    """Of a model's weights and buffers."""
    from hf_memopt.estimator.tracing.trace import loaded_tensors

    storages = [tensor.untyped_storage() for tensor in loaded_tensors(model)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def lora(rank: int = 8, **more):
    from peft import LoraConfig

    return LoraConfig(**{"r": rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **more})


def four_bits(double: bool = False, compute: str = "bfloat16", **more):
    from transformers import BitsAndBytesConfig

    kinds = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": double, "bnb_4bit_compute_dtype": compute}
    return BitsAndBytesConfig(load_in_4bit=True, **kinds, **more)
