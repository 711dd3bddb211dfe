"""LoRA for sequence classification, hard-coded as PEFT's notebooks are.

python peft_lora_classification.py
"""

from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

model_name_or_path = "models/roberta"
tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, padding_side="right")
dataset = load_dataset("json", data_files="data/glue.json")


def tokenize_function(examples):
    return tokenizer(examples["sentence"], truncation=True, max_length=None)


tokenized_datasets = dataset.map(tokenize_function, batched=True, remove_columns=["sentence"])
tokenized_datasets = tokenized_datasets.rename_column("label", "labels")
peft_config = LoraConfig(task_type=TaskType.SEQ_CLS, inference_mode=False, r=8, lora_alpha=16, lora_dropout=0.1)
model = AutoModelForSequenceClassification.from_pretrained(model_name_or_path, return_dict=True)
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()
training_args = TrainingArguments(
    output_dir="roberta-large-lora", learning_rate=1e-3, per_device_train_batch_size=16, num_train_epochs=2
)
trainer = Trainer(
    model=model,
    args=training_args,
    train_dataset=tokenized_datasets["train"],
    processing_class=tokenizer,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer, padding="longest"),
)
trainer.train()
