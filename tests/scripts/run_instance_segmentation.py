"""Instance segmentation with MaskFormer from a configuration, as transformers' run_instance_segmentation.py: masks
and classes are lists of tensors, one an image.

python run_instance_segmentation.py --image_size 64 --per_device_train_batch_size 2 --output_dir out
"""

from dataclasses import dataclass

import scipy  # noqa: F401 (the loss of these models needs it)
import torch
from transformers import (
    HfArgumentParser,
    MaskFormerConfig,
    MaskFormerForInstanceSegmentation,
    Trainer,
    TrainingArguments,
)


@dataclass
class Arguments:
    image_size: int = 512
    num_instances: int = 3


class Instances(torch.utils.data.Dataset):
    """Images with as many instances each."""

    def __init__(self, args: Arguments):
        self.args = args

    def __len__(self):
        return 64

    def __getitem__(self, index):
        size, count = self.args.image_size, self.args.num_instances
        masks = torch.zeros(count, size, size)
        for instance in range(count):
            masks[instance, instance * 8 : (instance + 1) * 8] = 1
        labels = torch.arange(count) % 2
        return {"pixel_values": torch.rand(3, size, size), "mask_labels": masks, "class_labels": labels}


def collate_fn(examples):
    batch = {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}
    batch["class_labels"] = [example["class_labels"] for example in examples]
    batch["mask_labels"] = [example["mask_labels"] for example in examples]
    return batch


def main():
    args, training_args = HfArgumentParser([Arguments, TrainingArguments]).parse_args_into_dataclasses()
    training_args.eval_do_concat_batches = False
    training_args.remove_unused_columns = False
    config = MaskFormerConfig(
        backbone_config={"model_type": "swin", "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 8]}
        | {"image_size": args.image_size, "window_size": 2, "out_features": ["stage1", "stage2", "stage3", "stage4"]},
        decoder_config={"model_type": "detr", "d_model": 32, "encoder_layers": 2, "decoder_layers": 2}
        | {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10, "decoder_attention_heads": 4},
        fpn_feature_size=32,
        mask_feature_size=32,
    )
    model = MaskFormerForInstanceSegmentation(config)
    trainer = Trainer(model=model, args=training_args, train_dataset=Instances(args), data_collator=collate_fn)
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
