"""A small run that waits in one of its steps for a signal: python stoppable.py FOLDER STEP FIELDS, as JSON.

In step STEP it prints its number and waits for FOLDER/go.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from small_runs import QUIET, Rows, collate, llama
from transformers import TrainerCallback, TrainingArguments

from hf_memopt import MemoryTrainer

FIELDS = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "save_strategy": "steps",
    "save_steps": 2,
    "optim": "adamw_torch",
}


class Waiting(TrainerCallback):
    """Says that a step has begun, and stays in it until the test has sent its signal."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            os.write(1, f"waiting {os.getpid()}\n".encode())  # at once: print() of two processes makes one line
            while not (self.folder / "go").exists():
                time.sleep(0.01)


def build(folder: Path, step: int = 0, **fields) -> MemoryTrainer:
    args = TrainingArguments(str(folder), remove_unused_columns=False, **{**QUIET, **FIELDS, **fields})
    data = {"train_dataset": Rows(), "eval_dataset": Rows(8, 1000), "data_collator": collate}
    return MemoryTrainer(model=llama(dropout=0.1), args=args, callbacks=[Waiting(folder, step)], **data)


def weights(trainer) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in trainer.model.parameters()])


if __name__ == "__main__":
    from hf_memopt.program import run

    def main():
        folder = Path(sys.argv[1])
        trainer = build(folder, int(sys.argv[2]), **json.loads(sys.argv[3]))
        trainer.train()
        print("train() came back")

    run(main)
