"""Prefix tuning of a causal language model, in the shape of PEFT's causal language modelling examples.

python peft_prefix_tuning.py
"""

from datasets import load_dataset
from peft import PrefixTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

model = AutoModelForCausalLM.from_pretrained("models/mistral")
model = get_peft_model(model, PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=30))
tokenizer = AutoTokenizer.from_pretrained("models/mistral")
if tokenizer.pad_token_id is None:
    tokenizer.pad_token_id = tokenizer.eos_token_id


def preprocess_function(examples):
    pairs = zip(examples["source"], examples["target"], strict=True)
    rows = tokenizer([f"{source} {target}" for source, target in pairs])
    rows["labels"] = rows["input_ids"].copy()
    return rows


dataset = load_dataset("json", data_files="data/pairs.json")["train"].map(
    preprocess_function, batched=True, remove_columns=["source", "target"]
)
args = TrainingArguments("prefix", per_device_train_batch_size=8, learning_rate=3e-2, num_train_epochs=50)
Trainer(model=model, args=args, train_dataset=dataset, data_collator=default_data_collator).train()
