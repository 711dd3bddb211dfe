"""Multiple choice, as transformers' run_swag.py.

python run_swag.py --model models/bert --data data/swag.json --output_dir out
"""

import argparse
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoModelForMultipleChoice,
    AutoTokenizer,
    DataCollatorForMultipleChoice,
    Trainer,
    TrainingArguments,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--data", required=True)
parser.add_argument("--output_dir", required=True)
args = parser.parse_args()

raw = load_dataset("json", data_files=args.data)
tokenizer = AutoTokenizer.from_pretrained(args.model, use_fast=True)
model = AutoModelForMultipleChoice.from_pretrained(args.model)
ending_names = [f"ending{i}" for i in range(4)]


def preprocess_function(examples):
    first_sentences = list(chain(*([context] * 4 for context in examples["startphrase"])))
    rows = range(len(examples["startphrase"]))
    second_sentences = list(chain(*([examples[end][i] for end in ending_names] for i in rows)))
    tokenized = tokenizer(first_sentences, second_sentences, truncation=True, max_length=64, padding=False)
    return {k: [v[i : i + 4] for i in range(0, len(v), 4)] for k, v in tokenized.items()}


train_dataset = raw["train"].map(preprocess_function, batched=True)
trainer = Trainer(
    model=model,
    args=TrainingArguments(args.output_dir, per_device_train_batch_size=4, learning_rate=5e-5, num_train_epochs=3),
    train_dataset=train_dataset,
    processing_class=tokenizer,
    data_collator=DataCollatorForMultipleChoice(tokenizer=tokenizer, pad_to_multiple_of=None, return_tensors="pt"),
)
train_result = trainer.train()
trainer.save_model()
