"""A run whose address space is limited once it trains: python limited_memory.py KIND FOLDER [MIB]; prints losses."""

import json
import resource
import sys
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import hf_memopt

LENGTH, ROWS, VOCABULARY = 256, 8, 8000


class Limit(TrainerCallback):
    """From the second step on, only so many MiB more than now can be had."""

    def __init__(self, mib: int):
        self.mib = mib

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            size = pages * resource.getpagesize() + self.mib * 2**20
            resource.setrlimit(resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))


def collate(rows):
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids}


def main(kind: str, folder: str, mib: str | None = None) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    data = list(torch.randint(0, VOCABULARY, (ROWS * 6, LENGTH)))
    args = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=ROWS,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        optim="sgd",
        learning_rate=0.1,
    )
    trainer = getattr(hf_memopt if kind.startswith("Memory") else transformers, kind)(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=data,
        data_collator=collate,
        callbacks=[Limit(int(mib))] if mib else None,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"losses": losses, "events": getattr(trainer, "memory_events", [])}))


if __name__ == "__main__":
    main(*sys.argv[1:])
