"""Translation with Marian, as transformers' run_translation.py.

python run_translation.py --model_name_or_path models/marian --train_file data/pairs.json
    --per_device_train_batch_size 8 --label_smoothing_factor 0.1 --output_dir out
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    source_prefix: str = ""


def main():
    args, training_args = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    raw = load_dataset("json", data_files={"train": args.train_file})
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path, config=config)
    if model.config.decoder_start_token_id is None:
        raise ValueError("Make sure that `config.decoder_start_token_id` is correctly defined")

    def preprocess_function(examples):
        inputs = [args.source_prefix + text for text in examples["source"]]
        return tokenizer(inputs, text_target=examples["target"], max_length=128, truncation=True)

    data = raw.map(preprocess_function, batched=True, remove_columns=["source", "target"])
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
