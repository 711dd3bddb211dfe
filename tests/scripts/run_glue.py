"""Sequence classification with metrics, as transformers' run_glue.py.

python run_glue.py --model_name_or_path models/bert --train_file data/glue.json --max_seq_length 64 --do_train
    --do_eval --per_device_train_batch_size 8 --eval_strategy steps --eval_steps 1 --output_dir out
"""

from dataclasses import dataclass

import numpy as np
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class DataTrainingArguments:
    model_name_or_path: str
    train_file: str
    max_seq_length: int = 128
    pad_to_max_length: bool = True


def compute_metrics(prediction: EvalPrediction):
    return {"accuracy": (np.argmax(prediction.predictions, axis=1) == prediction.label_ids).astype(float).mean()}


def main():
    parser = HfArgumentParser((DataTrainingArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    raw = load_dataset("json", data_files=data_args.train_file, split="train").train_test_split(0.25, seed=1)
    labels = sorted(set(raw["train"]["label"]))
    config = AutoConfig.from_pretrained(data_args.model_name_or_path, num_labels=len(labels), finetuning_task="sst2")
    tokenizer = AutoTokenizer.from_pretrained(data_args.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        data_args.model_name_or_path, config=config, ignore_mismatched_sizes=False
    )
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess_function(examples):
        return tokenizer(examples["sentence"], padding=padding, max_length=data_args.max_seq_length, truncation=True)

    data = raw.map(preprocess_function, batched=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"] if training_args.do_train else None,
        eval_dataset=data["test"] if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    metrics = trainer.train().metrics
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
