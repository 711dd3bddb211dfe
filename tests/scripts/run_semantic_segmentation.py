"""Semantic segmentation with SegFormer, as transformers' run_semantic_segmentation.py.

python run_semantic_segmentation.py --model_name_or_path models/segformer --train_dir data/images --do_train
    --remove_unused_columns False --per_device_train_batch_size 4 --output_dir out
"""

from dataclasses import dataclass

import numpy as np
import torch
from datasets import load_dataset
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForSemanticSegmentation,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_dir: str
    do_reduce_labels: bool = False


def main():
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    dataset = load_dataset("imagefolder", data_dir=args.train_dir)
    id2label = {0: "background", 1: "left", 2: "right"}
    config = AutoConfig.from_pretrained(
        args.model_name_or_path, id2label=id2label, label2id={name: i for i, name in id2label.items()}
    )
    model = AutoModelForSemanticSegmentation.from_pretrained(
        args.model_name_or_path, config=config, ignore_mismatched_sizes=True
    )
    image_processor = AutoImageProcessor.from_pretrained(
        args.model_name_or_path, do_reduce_labels=args.do_reduce_labels
    )

    def preprocess_batch(examples):
        images = [image.convert("RGB") for image in examples["image"]]
        masks = [np.zeros((image.height, image.width), dtype=np.uint8) for image in images]
        for mask in masks:
            mask[:, : mask.shape[1] // 2] = 1
            mask[:, mask.shape[1] // 2 :] = 2
        inputs = image_processor(images, [Image.fromarray(mask) for mask in masks], return_tensors="pt")
        return {"pixel_values": inputs["pixel_values"], "labels": torch.as_tensor(inputs["labels"])}

    dataset["train"].set_transform(preprocess_batch)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"] if training_args.do_train else None,
        processing_class=image_processor,
        data_collator=default_data_collator,
    )
    if training_args.do_train:
        trainer.train()
        trainer.save_model()


if __name__ == "__main__":
    main()
