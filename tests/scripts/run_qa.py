"""Extractive question answering with a Trainer of the script's own, as transformers' run_qa.py and trainer_qa.py.

python run_qa.py --model_name_or_path models/bert --train_file data/qa.json --per_device_train_batch_size 8
    --output_dir out
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForQuestionAnswering,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    max_seq_length: int = 64
    doc_stride: int = 16


class QuestionAnsweringTrainer(Trainer):
    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function


def main():
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    raw = load_dataset("json", data_files={"train": args.train_file})
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(args.model_name_or_path)

    def prepare_train_features(examples):
        tokenized = tokenizer(
            examples["question"],
            examples["context"],
            truncation="only_second",
            max_length=args.max_seq_length,
            stride=args.doc_stride,
            return_overflowing_tokens=True,
            padding="max_length",
        )
        rows = tokenized.pop("overflow_to_sample_mapping")
        tokenized["start_positions"] = [examples["start"][row] for row in rows]
        tokenized["end_positions"] = [examples["start"][row] + 2 for row in rows]
        return tokenized

    train_dataset = raw["train"].map(prepare_train_features, batched=True, remove_columns=raw["train"].column_names)
    trainer = QuestionAnsweringTrainer(
        model=model, args=training_args, train_dataset=train_dataset, data_collator=default_data_collator
    )
    trainer.train()


if __name__ == "__main__":
    main()
