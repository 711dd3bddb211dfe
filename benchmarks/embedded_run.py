"""The embedded pretraining job in short: built-in model and text, whose held-out loss shows what a setting costs."""

import functools
import tempfile
import time

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from hf_memopt import MemoryArguments, MemoryTrainer
from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import packed

LENGTH, ROWS = 128, 8


@functools.cache
def data():
    """Training and held-out blocks of 128 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_model())
    train, held_out, columns = load_rows("builtin:documents")
    return packed(train, columns, tokenizer, LENGTH), packed(held_out, columns, tokenizer, LENGTH).select(range(64))


class StepTimes(TrainerCallback):
    """Seconds of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.began)


def train(fields: dict, memory: dict | None = None, steps: int = 60):
    """Train from the same random weights on the same batches.

    Returns:
        The trainer, its held-out loss, and the seconds of every step.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(builtin_model()))
    times = StepTimes()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            **{
                "per_device_train_batch_size": ROWS,
                "max_steps": steps,
                "learning_rate": 3e-3,
                "warmup_steps": 0.1,
                "lr_scheduler_type": "cosine",
                "report_to": "none",
                "disable_tqdm": True,
                "logging_strategy": "no",
                "save_strategy": "no",
                "use_cpu": not torch.cuda.is_available(),
                **fields,
            },
        )
        training, held_out = data()
        given = {
            "model": model,
            "args": args,
            "train_dataset": training,
            "eval_dataset": held_out,
            "data_collator": default_data_collator,
            "callbacks": [times],
        }
        trainer = MemoryTrainer(**given, memory_args=MemoryArguments(**memory)) if memory else Trainer(**given)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    return trainer, loss, times.seconds
