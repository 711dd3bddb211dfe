"""Audio classification with Wav2Vec2, as transformers' run_audio_classification.py: dataset transforms at run time.

python run_audio_classification.py
"""

import numpy as np
from datasets import ClassLabel, Dataset
from transformers import AutoFeatureExtractor, AutoModelForAudioClassification, Trainer, TrainingArguments

MAX_LENGTH_SECONDS = 0.5

feature_extractor = AutoFeatureExtractor.from_pretrained("models/wav2vec2", return_attention_mask=True)
model_input_name = feature_extractor.model_input_names[0]
clips = np.random.default_rng(0).standard_normal((32, 10_000)).astype("float32")
dataset = Dataset.from_dict({"audio": list(clips), "label": [n % 2 for n in range(32)]})
dataset = dataset.cast_column("label", ClassLabel(names=["no", "yes"]))


def random_subsample(wav, max_length, sample_rate=16000):
    length = round(sample_rate * max_length)
    start = np.random.randint(0, len(wav) - length - 1)
    return wav[start : start + length]


def train_transforms(batch):
    clips = [random_subsample(audio, MAX_LENGTH_SECONDS) for audio in batch["audio"]]
    inputs = feature_extractor(clips, sampling_rate=feature_extractor.sampling_rate)
    return {model_input_name: inputs.get(model_input_name), "labels": list(batch["label"])}


dataset.set_transform(train_transforms, output_all_columns=False)
names = dataset.features["label"].names
model = AutoModelForAudioClassification.from_pretrained(
    "models/wav2vec2",
    num_labels=len(names),
    label2id={name: str(i) for i, name in enumerate(names)},
    id2label={str(i): name for i, name in enumerate(names)},
    layerdrop=0.0,
)
model.freeze_feature_encoder()
trainer = Trainer(
    model=model,
    args=TrainingArguments("ac", per_device_train_batch_size=4, remove_unused_columns=False, learning_rate=3e-5),
    train_dataset=dataset,
    processing_class=feature_extractor,
)
trainer.train()
