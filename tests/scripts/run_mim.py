"""Masked image modelling (SimMIM), as transformers' run_mim.py.

python run_mim.py --model models/vit --data_dir data/images --mask_patch_size 16 --mask_ratio 0.6
"""

import argparse

import numpy as np
import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoImageProcessor, AutoModelForMaskedImageModeling, Trainer, TrainingArguments


class MaskGenerator:
    """Which patches of an image are masked: a number of them that does not vary."""

    def __init__(self, input_size, mask_patch_size, model_patch_size, mask_ratio):
        self.scale = mask_patch_size // model_patch_size
        self.rand_size = input_size // mask_patch_size
        self.mask_count = int(np.ceil(self.rand_size**2 * mask_ratio))

    def __call__(self):
        mask = np.zeros(self.rand_size**2, dtype=int)
        mask[np.random.permutation(self.rand_size**2)[: self.mask_count]] = 1
        mask = mask.reshape((self.rand_size, self.rand_size)).repeat(self.scale, axis=0).repeat(self.scale, axis=1)
        return torch.tensor(mask.flatten())


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    return {"pixel_values": pixel_values, "bool_masked_pos": torch.stack([example["mask"] for example in examples])}


parser = argparse.ArgumentParser()
parser.add_argument("--model")
parser.add_argument("--data_dir")
parser.add_argument("--mask_patch_size", type=int, default=32)
parser.add_argument("--mask_ratio", type=float, default=0.6)
args = parser.parse_args()

config = AutoConfig.from_pretrained(args.model, encoder_stride=8)
image_processor = AutoImageProcessor.from_pretrained(args.model)
model = AutoModelForMaskedImageModeling.from_config(config)
mask_generator = MaskGenerator(config.image_size, args.mask_patch_size, config.patch_size, args.mask_ratio)


def preprocess_images(examples):
    examples["pixel_values"] = [image_processor(i, return_tensors="pt")["pixel_values"][0] for i in examples["image"]]
    examples["mask"] = [mask_generator() for _ in examples["image"]]
    return examples


dataset = load_dataset("imagefolder", data_dir=args.data_dir)["train"]
dataset.set_transform(preprocess_images)
training_args = TrainingArguments("out", per_device_train_batch_size=8, remove_unused_columns=False)
Trainer(model, training_args, train_dataset=dataset, data_collator=collate_fn).train()
