"""A Trainer that builds its model by model_init, as for hyperparameter search in transformers' docs.

python model_init.py --model_name_or_path=models/roberta
"""

import argparse

import numpy as np
from datasets import load_dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments


def parse_args():
    parser = argparse.ArgumentParser(description="Finetune a transformers model on a text classification task")
    parser.add_argument("--model_name_or_path", type=str, required=True)
    parser.add_argument("--batch_size", type=int, default=8)
    return parser.parse_args()


def main():
    args = parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    dataset = load_dataset("json", data_files="data/glue.json")["train"].train_test_split(test_size=16)
    dataset = dataset.map(lambda rows: tokenizer(rows["sentence"], truncation=True), batched=True)

    def model_init():
        return AutoModelForSequenceClassification.from_pretrained(args.model_name_or_path, return_dict=True)

    def compute_metrics(eval_pred):
        predictions, labels = eval_pred
        return {"accuracy": float((np.argmax(predictions, axis=-1) == labels).mean())}

    training_args = TrainingArguments(
        "test",
        eval_strategy="steps",
        eval_steps=1,
        per_device_train_batch_size=args.batch_size,
        disable_tqdm=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model_init=model_init,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
    )
    trainer.train()


if __name__ == "__main__":
    main()
