"""Trains under the launcher's engine; the second process runs out of memory in its third step."""

import sys
from functools import wraps

import torch
from small_runs import OOM, QUIET, Rows, collate
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_memopt import MemoryTrainer
from hf_memopt.program import run


def main(folder: str) -> None:
    args = TrainingArguments(
        folder,
        remove_unused_columns=False,
        max_steps=6,
        per_device_train_batch_size=2,
        **{**QUIET, "save_strategy": "steps", "save_steps": 1},
    )
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    trainer = MemoryTrainer(model=LlamaForCausalLM(config), args=args, train_dataset=Rows(), data_collator=collate)
    forward = trainer.model.forward

    @wraps(forward)
    def failing(*args, **kwargs):
        if trainer.args.process_index == 1 and trainer.state.global_step == 2:
            raise torch.OutOfMemoryError(OOM)
        return forward(*args, **kwargs)

    trainer.model.forward = failing
    trainer.train()


if __name__ == "__main__":
    run(lambda: main(sys.argv[1]))
