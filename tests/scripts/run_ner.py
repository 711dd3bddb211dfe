"""Token classification, as transformers' run_ner.py.

python run_ner.py --model_name_or_path models/deberta-v2 --train_file data/ner.json
    --per_device_train_batch_size 8 --output_dir out
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str


def main():
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    raw = load_dataset("json", data_files={"train": args.train_file})
    label_list = sorted({label for row in raw["train"]["ner_tags"] for label in row})
    config = AutoConfig.from_pretrained(args.model_name_or_path, num_labels=len(label_list), finetuning_task="ner")
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path, use_fast=True)
    model = AutoModelForTokenClassification.from_pretrained(args.model_name_or_path, config=config)
    model.config.label2id = {str(label): i for i, label in enumerate(label_list)}
    model.config.id2label = {i: str(label) for i, label in enumerate(label_list)}

    def tokenize_and_align_labels(examples):
        tokenized = tokenizer(examples["tokens"], truncation=True, is_split_into_words=True)
        tokenized["labels"] = []
        for i, labels in enumerate(examples["ner_tags"]):
            words = tokenized.word_ids(batch_index=i)
            previous = [None, *words[:-1]]
            tokenized["labels"].append(
                [-100 if w is None or w == p else labels[w] for w, p in zip(words, previous, strict=True)]
            )
        return tokenized

    data = raw.map(tokenize_and_align_labels, batched=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=None),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
