"""Contrastive training of images and captions, as transformers' run_clip.py.

python run_clip.py --model_name_or_path models/clip --train_dir data/images --max_seq_length 32
    --remove_unused_columns False --per_device_train_batch_size 8 --freeze_text_model --output_dir out
"""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer, HfArgumentParser, Trainer, TrainingArguments


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_dir: str
    max_seq_length: int = 128
    freeze_vision_model: bool = False
    freeze_text_model: bool = False


def collate_fn(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "input_ids": torch.tensor([example["input_ids"] for example in examples], dtype=torch.long),
        "attention_mask": torch.tensor([example["attention_mask"] for example in examples], dtype=torch.long),
        "return_loss": True,
    }


def main():
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    image_processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    model = AutoModel.from_pretrained(args.model_name_or_path)

    def _freeze_params(module):
        for param in module.parameters():
            param.requires_grad = False

    if args.freeze_vision_model:
        _freeze_params(model.vision_model)
    if args.freeze_text_model:
        _freeze_params(model.text_model)
    dataset = load_dataset("imagefolder", data_dir=args.train_dir)["train"]

    def transform(examples):
        captions = [f"word1 word2 word{label} </s>" for label in examples["label"]]
        inputs = tokenizer(captions, max_length=args.max_seq_length, padding="max_length", truncation=True)
        pixels = image_processor([image.convert("RGB") for image in examples["image"]], return_tensors="pt")
        return {"pixel_values": list(pixels["pixel_values"]), **inputs}

    dataset.set_transform(transform)
    trainer = Trainer(model=model, args=training_args, train_dataset=dataset, data_collator=collate_fn)
    train_result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", train_result.metrics)


if __name__ == "__main__":
    main()
