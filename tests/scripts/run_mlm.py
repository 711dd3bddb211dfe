"""Masked language modelling, line by line, as transformers' run_mlm.py.

python run_mlm.py --model_name_or_path models/roberta --train_file data/train.txt --max_seq_length 50
    --per_device_train_batch_size 8 --output_dir out
"""

from dataclasses import dataclass, field

from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    max_seq_length: int = 128
    mlm_probability: float = field(default=0.15, metadata={"help": "Ratio of tokens to mask"})


def main():
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    raw = load_dataset("text", data_files={"train": args.train_file})
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(args.model_name_or_path)

    def tokenize_function(examples):
        examples["text"] = [line for line in examples["text"] if len(line) > 0 and not line.isspace()]
        return tokenizer(
            examples["text"],
            padding="max_length",
            truncation=True,
            max_length=args.max_seq_length,
            return_special_tokens_mask=True,
        )

    tokenized = raw.map(tokenize_function, batched=True, remove_columns=["text"])
    collator = DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=args.mlm_probability)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        processing_class=tokenizer,
        data_collator=collator,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
