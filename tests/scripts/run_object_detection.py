"""Object detection with YOLOS, as transformers' run_object_detection.py: labels are dicts, a list of them a batch.

python run_object_detection.py --model_name_or_path models/yolos --train_dir data/images
    --remove_unused_columns False --per_device_train_batch_size 4 --output_dir out
"""

from dataclasses import dataclass
from functools import partial

import scipy  # noqa: F401 (the loss of these models needs it)
import torch
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForObjectDetection,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_dir: str


def format_image_annotations_as_coco(image_id, categories, areas, bboxes):
    rows = zip(categories, areas, bboxes, strict=True)
    annotations = [
        {"image_id": image_id, "category_id": category, "iscrowd": 0, "area": area, "bbox": list(bbox)}
        for category, area, bbox in rows
    ]
    return {"image_id": image_id, "annotations": annotations}


def transform_batch(examples, image_processor):
    images = [image.convert("RGB") for image in examples["image"]]
    boxes = [(4, 4, 20, 20), (10, 30, 16, 16), (32, 8, 24, 12)]
    annotations = [
        format_image_annotations_as_coco(number, [label, 1 - label, label], [w * h for *_, w, h in boxes], boxes)
        for number, label in enumerate(examples["label"])
    ]
    return image_processor(images=images, annotations=annotations, return_tensors="pt")


def collate_fn(batch):
    pixel_values = torch.stack([row["pixel_values"] for row in batch])
    return {"pixel_values": pixel_values, "labels": [row["labels"] for row in batch]}


def main():
    args, training_args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    dataset = load_dataset("imagefolder", data_dir=args.train_dir)["train"]
    id2label = dict(enumerate(dataset.features["label"].names))
    label2id = {v: k for k, v in id2label.items()}
    config = AutoConfig.from_pretrained(args.model_name_or_path, label2id=label2id, id2label=id2label)
    model = AutoModelForObjectDetection.from_pretrained(args.model_name_or_path, config=config)
    image_processor = AutoImageProcessor.from_pretrained(args.model_name_or_path)
    train_dataset = dataset.with_transform(partial(transform_batch, image_processor=image_processor))
    Trainer(model, training_args, train_dataset=train_dataset, data_collator=collate_fn).train()


if __name__ == "__main__":
    main()
