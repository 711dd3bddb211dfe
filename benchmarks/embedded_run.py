"""The embedded pretraining job in short: built-in model and text, whose held-out loss shows what a setting costs."""

import functools
import tempfile
import time

import torch
from jobs import make_trainer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from hf_memopt.data.builtin_model import builtin_model
from hf_memopt.data.sources import load_rows
from hf_memopt.data.tokens import packed

LENGTH = 128
SCHEDULE = {"learning_rate": 3e-3, "warmup_steps": 0.1, "lr_scheduler_type": "cosine"}


@functools.cache
def data():
    """Training and held-out blocks of 128 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(builtin_model())
    train, held_out, _ = load_rows("builtin:documents")
    return packed(train, tokenizer, LENGTH), packed(held_out, tokenizer, LENGTH).select(range(64))


class StepTimes(TrainerCallback):
    """Seconds of every optimizer step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_, **__):
        self.began = time.perf_counter()

    def on_step_end(self, *_, **__):
        self.seconds.append(time.perf_counter() - self.began)


def make_model():
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(builtin_model()))


def train(fields: dict, memory: dict | None = None, steps: int = 60):
    """Train from the same random weights on the same batches.

    Returns:
        The trainer, its held-out loss, and the seconds of every step.
    """
    torch.manual_seed(0)
    times, (training, held_out) = StepTimes(), data()
    usual = {
        "per_device_train_batch_size": 8,
        "max_steps": steps,
        "use_cpu": not torch.cuda.is_available(),
        **SCHEDULE,
    }
    with tempfile.TemporaryDirectory() as folder:
        more = {"eval_dataset": held_out, "callbacks": [times]}
        trainer = make_trainer(folder, make_model(), {**usual, **fields}, training, memory or None, **more)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
    return trainer, loss, times.seconds
