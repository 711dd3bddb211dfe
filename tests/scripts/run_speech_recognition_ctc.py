"""Speech recognition with CTC, as transformers' run_speech_recognition_ctc.py: a padding collator of the script's own.

python run_speech_recognition_ctc.py --model_name_or_path models/wav2vec2 --freeze_feature_encoder
    --per_device_train_batch_size 4 --activation_checkpointing --output_dir out
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForCTC,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class ModelArguments:
    model_name_or_path: str
    freeze_feature_encoder: bool = False
    mask_time_prob: float = 0.05


@dataclass
class DataCollatorCTCWithPadding:
    feature_extractor: Any
    tokenizer: Any

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        audio = [{"input_values": feature["input_values"]} for feature in features]
        batch = self.feature_extractor.pad(audio, padding=True, return_tensors="pt")
        texts = [{"input_ids": feature["labels"]} for feature in features]
        labels = self.tokenizer.pad(texts, padding=True, return_tensors="pt")
        batch["labels"] = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        return batch


def main():
    args, training_args = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    feature_extractor = AutoFeatureExtractor.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    config.update({"mask_time_prob": args.mask_time_prob, "layerdrop": 0.0, "vocab_size": len(tokenizer)})
    model = AutoModelForCTC.from_pretrained(args.model_name_or_path, config=config)
    if args.freeze_feature_encoder:
        model.freeze_feature_encoder()
    generator = np.random.default_rng(0)

    def prepare_dataset(row):
        audio = generator.standard_normal(8000, dtype=np.float32)
        inputs = feature_extractor(audio, sampling_rate=16_000)
        return {"input_values": inputs.input_values[0], "labels": tokenizer(row["text"]).input_ids}

    rows = Dataset.from_dict({"text": ["word1 word2 word3 word4 word5"] * 32})
    trainer = Trainer(
        model=model,
        data_collator=DataCollatorCTCWithPadding(feature_extractor, tokenizer),
        args=training_args,
        train_dataset=rows.map(prepare_dataset, remove_columns=["text"]),
    )
    trainer.train()


if __name__ == "__main__":
    main()
