"""Causal language modelling over blocks of text, as transformers' run_clm.py.

python run_clm.py --model_name_or_path models/gpt2 --train_file data/train.txt --block_size 64 --do_train
    --per_device_train_batch_size 4 --output_dir out
"""

import os
from dataclasses import dataclass, field
from itertools import chain

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default=None)


@dataclass
class DataTrainingArguments:
    train_file: str | None = field(default=None)
    block_size: int | None = field(default=None)


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw_datasets = load_dataset("text", data_files={"train": data_args.train_file})
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw_datasets.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])

    def group_texts(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        starts = range(0, total, data_args.block_size)
        result = {name: [ids[i : i + data_args.block_size] for i in starts] for name, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    lm_datasets = tokenized.map(group_texts, batched=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm_datasets["train"] if training_args.do_train else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        train_result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", train_result.metrics)
        trainer.save_state()
    trainer.create_model_card(finetuned_from=os.path.basename(model_args.model_name_or_path))


if __name__ == "__main__":
    main()
