"""T5 pre-training by span corruption with a numpy collator, as transformers' flax example run_t5_mlm_flax.py.

python t5_span_corruption.py --model models/t5 --train_file data/train.txt --max_seq_length 46
"""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoTokenizer, T5ForConditionalGeneration, Trainer, TrainingArguments


@dataclass
class DataCollatorForT5MLM:
    tokenizer: object
    span_length: int
    spans: int
    pad_token_id: int

    def __call__(self, examples):
        ids = np.array([example["input_ids"] for example in examples])
        sentinels = self.tokenizer.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(self.spans)])
        inputs, labels = [], []
        for row in ids:
            starts = np.linspace(2, len(row) - 2 * self.span_length, self.spans).astype(int)
            kept, dropped, last = [], [], 0
            for start, sentinel in zip(starts, sentinels, strict=True):
                kept += [*row[last:start], sentinel]
                dropped += [sentinel, *row[start : start + self.span_length]]
                last = start + self.span_length
            inputs.append([*kept, *row[last:]])
            labels.append(dropped)
        batch = {"input_ids": torch.tensor(np.array(inputs)), "labels": torch.tensor(np.array(labels))}
        shifted = torch.full_like(batch["labels"], self.pad_token_id)
        shifted[:, 1:] = batch["labels"][:, :-1]
        return {**batch, "decoder_input_ids": shifted}


parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--train_file")
parser.add_argument("--max_seq_length", type=int)
args = parser.parse_args()

tokenizer = AutoTokenizer.from_pretrained(args.model)
model = T5ForConditionalGeneration(AutoConfig.from_pretrained(args.model, vocab_size=len(tokenizer)))
dataset = load_dataset("text", data_files=args.train_file)["train"].map(
    lambda rows: tokenizer(rows["text"], max_length=args.max_seq_length, truncation=True, return_attention_mask=False),
    batched=True,
    remove_columns=["text"],
)
trainer = Trainer(
    model=model,
    args=TrainingArguments("t5", per_device_train_batch_size=8, optim="adafactor", learning_rate=5e-3),
    train_dataset=dataset,
    data_collator=DataCollatorForT5MLM(tokenizer, span_length=3, spans=3, pad_token_id=model.config.pad_token_id),
)
trainer.train()
