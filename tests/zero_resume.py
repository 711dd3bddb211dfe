"""A DeepSpeed process that trains, resumes from its checkpoint, and then finds code in it.

torchrun --standalone --nproc_per_node 1 zero_resume.py OUTPUT_DIR PROOF STAGE

It prints a JSON line with what came of it.
"""

import glob
import json
import os
import sys

import torch
from small_runs import llama
from transformers import TrainingArguments

from hf_memopt import MemoryTrainer
from hf_memopt.errors import InputError

FOLDER, PROOF, STAGE = sys.argv[1:]
ZERO = {
    "zero_optimization": {"stage": int(STAGE)},
    "bf16": {"enabled": True},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_force_ds_cpu_optimizer": False,
}
ROWS = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}] * 8


class Runs:
    def __reduce__(self):
        return os.mkdir, (PROOF,)


def trainer(steps: int) -> MemoryTrainer:
    args = TrainingArguments(
        FOLDER,
        max_steps=steps,
        save_steps=2,
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        bf16=True,
        deepspeed=ZERO,
    )
    return MemoryTrainer(model=llama(torch.float32), args=args, train_dataset=ROWS)


trainer(2).train()
resumed = trainer(4)
resumed.train(resume_from_checkpoint=True)
for file in glob.glob(f"{FOLDER}/checkpoint-4/global_step*/*.pt"):
    held = torch.load(file, weights_only=False)
    torch.save(held | {"more": Runs()}, file)
os.remove(f"{FOLDER}/checkpoint-4/memory_manifest.json")
try:
    trainer(6).train(resume_from_checkpoint=f"{FOLDER}/checkpoint-4")
    refused = False
except InputError as error:
    refused = "could run code: GLOBAL posix.mkdir" in str(error)
print(json.dumps({"resumed": resumed.state.global_step, "refused": refused}))
