"""Classification of long documents with LoRA, evaluated while it trains.

python long_classification.py
"""

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

name = "models/llama"
tokenizer = AutoTokenizer.from_pretrained(name)
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=5)
model.config.pad_token_id = tokenizer.pad_token_id
model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=16, target_modules="all-linear"))
rows = [{"input_ids": [5] * 250, "attention_mask": [1] * 250, "labels": number % 5} for number in range(64)]
arguments = TrainingArguments(
    output_dir="out",
    per_device_train_batch_size=1,
    per_device_eval_batch_size=8,
    gradient_checkpointing=True,
    eval_strategy="steps",
    eval_steps=2,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_list(rows),
    eval_dataset=Dataset.from_list(rows),
    data_collator=DataCollatorWithPadding(tokenizer),
)
trainer.train()
