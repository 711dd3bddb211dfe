"""Pre-training of a masked autoencoder with a TrainingArguments of its own, as transformers' run_mae.py.

python run_mae.py --model_name_or_path models/vit-mae --train_dir data/images --remove_unused_columns False
    --label_names pixel_values --base_learning_rate 1.5e-4 --per_device_train_batch_size 8 --output_dir out
"""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import (
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    ViTImageProcessor,
    ViTMAEConfig,
    ViTMAEForPreTraining,
)


@dataclass
class ModelArguments:
    model_name_or_path: str
    train_dir: str
    mask_ratio: float = 0.75
    norm_pix_loss: bool = True


@dataclass
class CustomTrainingArguments(TrainingArguments):
    base_learning_rate: float = 1e-3


def collate_fn(examples):
    return {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}


def main():
    args, training_args = HfArgumentParser((ModelArguments, CustomTrainingArguments)).parse_args_into_dataclasses()
    config = ViTMAEConfig.from_pretrained(args.model_name_or_path)
    config.update({"mask_ratio": args.mask_ratio, "norm_pix_loss": args.norm_pix_loss})
    image_processor = ViTImageProcessor.from_pretrained(args.model_name_or_path)
    model = ViTMAEForPreTraining.from_pretrained(args.model_name_or_path, config=config)
    dataset = load_dataset("imagefolder", data_dir=args.train_dir)["train"]

    def preprocess_images(examples):
        examples["pixel_values"] = [image_processor(i, return_tensors="pt").pixel_values[0] for i in examples["image"]]
        return examples

    dataset.set_transform(preprocess_images)
    total = training_args.train_batch_size * training_args.gradient_accumulation_steps * training_args.world_size
    training_args.learning_rate = training_args.base_learning_rate * total / 256
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset,
        processing_class=image_processor,
        data_collator=collate_fn,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
