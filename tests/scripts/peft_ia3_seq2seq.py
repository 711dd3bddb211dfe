"""IA3 for T5, in the shape of PEFT's seq2seq examples.

python peft_ia3_seq2seq.py
"""

from datasets import load_dataset
from peft import IA3Config, TaskType, get_peft_model
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    default_data_collator,
)

text_column, label_column, max_length = "source", "target", 64
tokenizer = AutoTokenizer.from_pretrained("models/t5")
model = AutoModelForSeq2SeqLM.from_pretrained("models/t5")
model = get_peft_model(model, IA3Config(task_type=TaskType.SEQ_2_SEQ_LM, inference_mode=False))


def preprocess_function(examples):
    inputs = tokenizer(examples[text_column], max_length=max_length, padding="max_length", truncation=True)
    labels = tokenizer(examples[label_column], max_length=32, padding="max_length", truncation=True)["input_ids"]
    pad = tokenizer.pad_token_id
    inputs["labels"] = [[-100 if token == pad else token for token in row] for row in labels]
    return inputs


dataset = load_dataset("json", data_files="data/pairs.json")["train"]
dataset = dataset.map(preprocess_function, batched=True, remove_columns=dataset.column_names, num_proc=None)
args = Seq2SeqTrainingArguments("ia3", per_device_train_batch_size=8, learning_rate=8e-3, optim="adamw_torch")
Seq2SeqTrainer(model, args, train_dataset=dataset, data_collator=default_data_collator).train()
