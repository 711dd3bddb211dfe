"""Image classification with ViT, as transformers' run_image_classification.py.

python run_image_classification.py --model_name_or_path models/vit --train_dir data/images --remove_unused_columns
    False --do_train --per_device_train_batch_size 8 --output_dir out
"""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class DataTrainingArguments:
    model_name_or_path: str
    train_dir: str


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "labels": torch.tensor([example["label"] for example in examples])}


def main():
    data_args, training_args = HfArgumentParser(
        (DataTrainingArguments, TrainingArguments)
    ).parse_args_into_dataclasses()
    dataset = load_dataset("imagefolder", data_dir=data_args.train_dir)
    labels = dataset["train"].features["label"].names
    config = AutoConfig.from_pretrained(
        data_args.model_name_or_path,
        num_labels=len(labels),
        label2id={label: i for i, label in enumerate(labels)},
        id2label=dict(enumerate(labels)),
        finetuning_task="image-classification",
    )
    model = AutoModelForImageClassification.from_pretrained(
        data_args.model_name_or_path, config=config, ignore_mismatched_sizes=True
    )
    image_processor = AutoImageProcessor.from_pretrained(data_args.model_name_or_path)

    def train_transforms(batch):
        images = [image.convert("RGB") for image in batch["image"]]
        batch["pixel_values"] = list(image_processor(images, return_tensors="pt")["pixel_values"])
        return batch

    dataset["train"].set_transform(train_transforms)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"] if training_args.do_train else None,
        processing_class=image_processor,
        data_collator=collate_fn,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
