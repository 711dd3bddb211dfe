"""Permutation language modelling of XLNet, as transformers' run_plm.py.

python run_plm.py models/xlnet data/train.txt
"""

import sys

from datasets import load_dataset
from transformers import (
    AutoTokenizer,
    DataCollatorForPermutationLanguageModeling,
    Trainer,
    TrainingArguments,
    XLNetConfig,
    XLNetLMHeadModel,
)

model_name, train_file = sys.argv[1:]
max_seq_length = 50

config = XLNetConfig.from_pretrained(model_name)
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = XLNetLMHeadModel.from_pretrained(model_name, config=config)
datasets = load_dataset("text", data_files={"train": train_file})
tokenized = datasets.map(
    lambda rows: tokenizer(rows["text"], padding="max_length", truncation=True, max_length=max_seq_length),
    batched=True,
    remove_columns=["text"],
)
collator = DataCollatorForPermutationLanguageModeling(tokenizer=tokenizer, plm_probability=1 / 6, max_span_length=5)
training_args = TrainingArguments("out", per_device_train_batch_size=4, num_train_epochs=1, report_to="none")
trainer = Trainer(model, training_args, train_dataset=tokenized["train"], data_collator=collator)
trainer.train()
