"""A reranker, which reads a question and a passage at once; needs sentence-transformers.

python cross_encoder.py
"""

from datasets import load_dataset
from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

model = CrossEncoder("models/bert", num_labels=1)
pairs = load_dataset("json", data_files="data/pairs.json", split="train")
train_dataset = pairs.add_column("label", [float(number % 2) for number in range(len(pairs))])
args = CrossEncoderTrainingArguments(output_dir="out", per_device_train_batch_size=8, num_train_epochs=1)
trainer = CrossEncoderTrainer(model=model, args=args, train_dataset=train_dataset, loss=BinaryCrossEntropyLoss(model))
trainer.train()
