"""Generative question answering with T5, as transformers' run_seq2seq_qa.py.

python run_seq2seq_qa.py --model_name_or_path models/t5 --train_file data/qa.json --per_device_train_batch_size 8
    --predict_with_generate --output_dir out
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
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
    max_seq_length: int = 64
    max_answer_length: int = 8


class QuestionAnsweringSeq2SeqTrainer(Seq2SeqTrainer):
    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function


def main():
    args, training_args = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    raw = load_dataset("json", data_files={"train": args.train_file})
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)

    def preprocess_squad_batch(examples):
        pairs = zip(examples["question"], examples["context"], strict=True)
        inputs = [f"question: {question} context: {context}" for question, context in pairs]
        model_inputs = tokenizer(inputs, max_length=args.max_seq_length, padding="max_length", truncation=True)
        labels = tokenizer(
            text_target=examples["answer"], max_length=args.max_answer_length, padding="max_length", truncation=True
        )
        pad = tokenizer.pad_token_id
        model_inputs["labels"] = [[-100 if token == pad else token for token in row] for row in labels["input_ids"]]
        return model_inputs

    train_dataset = raw["train"].map(preprocess_squad_batch, batched=True, remove_columns=raw["train"].column_names)
    trainer = QuestionAnsweringSeq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
