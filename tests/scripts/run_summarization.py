"""Summarization with BART, hard-coded as in a course's notebook; shape of transformers' run_summarization.py.

python run_summarization.py
"""

from datasets import load_dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

checkpoint = "models/bart"
dataset = load_dataset("json", data_files="data/pairs.json", split="train").train_test_split(test_size=0.2)
tokenizer = AutoTokenizer.from_pretrained(checkpoint)
model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
prefix = "summarize: "


def preprocess_function(examples):
    model_inputs = tokenizer([prefix + doc for doc in examples["source"]], max_length=128, truncation=True)
    model_inputs["labels"] = tokenizer(text_target=examples["target"], max_length=64, truncation=True)["input_ids"]
    return model_inputs


tokenized = dataset.map(preprocess_function, batched=True)
training_args = Seq2SeqTrainingArguments(
    output_dir="my_awesome_billsum_model",
    eval_strategy="epoch",
    learning_rate=2e-5,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=8,
    weight_decay=0.01,
    save_total_limit=3,
    num_train_epochs=4,
    activation_checkpointing=True,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=training_args,
    train_dataset=tokenized["train"],
    eval_dataset=tokenized["test"],
    processing_class=tokenizer,
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer, model=checkpoint),
)
trainer.train()
trainer.save_model("my_awesome_billsum_model")
