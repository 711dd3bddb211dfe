"""Causal language modelling over a stream, whose length is not known: an IterableDataset of constant-length blocks.

python stream_clm.py
"""

import torch
from datasets import load_dataset
from torch.utils.data import IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


class ConstantLengthDataset(IterableDataset):
    def __init__(self, tokenizer, dataset, seq_length=128, infinite=True):
        self.tokenizer, self.dataset, self.seq_length, self.infinite = tokenizer, dataset, seq_length, infinite
        self.concat_token_id = tokenizer.eos_token_id

    def __iter__(self):
        buffer, more = [], True
        while more:
            for row in self.dataset:
                buffer += [*self.tokenizer(row["text"])["input_ids"], self.concat_token_id]
                while len(buffer) >= self.seq_length:
                    block, buffer = buffer[: self.seq_length], buffer[self.seq_length :]
                    yield {"input_ids": torch.LongTensor(block), "labels": torch.LongTensor(block)}
            more = self.infinite


tokenizer = AutoTokenizer.from_pretrained("models/mistral")
stream = load_dataset("text", data_files="data/train.txt", split="train", streaming=True)
stream = stream.shuffle(buffer_size=100, seed=0)
model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("models/mistral"))
training_args = TrainingArguments(
    output_dir="checkpoints",
    max_steps=100,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    learning_rate=5e-5,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    weight_decay=0.05,
    activation_checkpointing=True,
    logging_steps=1,
    report_to="none",
)
trainer = Trainer(model=model, args=training_args, train_dataset=ConstantLengthDataset(tokenizer, stream))
print("Training...")
trainer.train()
print("Saving last checkpoint of the model")
model.save_pretrained("final_checkpoint/")
