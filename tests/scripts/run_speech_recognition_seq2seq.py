"""Speech recognition with Whisper, as transformers' run_speech_recognition_seq2seq.py.

python run_speech_recognition_seq2seq.py --model_name_or_path models/whisper --per_device_train_batch_size 4
    --predict_with_generate --output_dir out
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)


@dataclass
class ModelArguments:
    model_name_or_path: str


@dataclass
class DataCollatorSpeechSeq2SeqWithPadding:
    feature_extractor: Any
    tokenizer: Any
    decoder_start_token_id: int

    def __call__(self, features: list[dict]) -> dict[str, torch.Tensor]:
        audio = [{"input_features": feature["input_features"]} for feature in features]
        batch = self.feature_extractor.pad(audio, return_tensors="pt")
        texts = [{"input_ids": feature["labels"]} for feature in features]
        labels_batch = self.tokenizer.pad(texts, return_tensors="pt")
        labels = labels_batch["input_ids"].masked_fill(labels_batch.attention_mask.ne(1), -100)
        if (labels[:, 0] == self.decoder_start_token_id).all().cpu().item():
            labels = labels[:, 1:]
        batch["labels"] = labels
        return batch


def main():
    args, training_args = HfArgumentParser((ModelArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    feature_extractor = AutoFeatureExtractor.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForSpeechSeq2Seq.from_pretrained(args.model_name_or_path, config=config)
    if model.config.decoder_start_token_id is None:
        raise ValueError("Make sure that `config.decoder_start_token_id` is correctly defined")
    generator = np.random.default_rng(0)

    def prepare_dataset(row):
        audio = generator.standard_normal(32000, dtype=np.float32)
        inputs = feature_extractor(audio, sampling_rate=16_000)
        return {"input_features": inputs["input_features"][0], "labels": tokenizer(row["text"]).input_ids}

    rows = Dataset.from_dict({"text": ["<s> word1 word2 word3 word4 word5 </s>"] * 32})
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=rows.map(prepare_dataset, remove_columns=["text"]),
        processing_class=feature_extractor,
        data_collator=DataCollatorSpeechSeq2SeqWithPadding(
            feature_extractor, tokenizer, model.config.decoder_start_token_id
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
