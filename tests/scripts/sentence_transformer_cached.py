"""Embeddings with in-batch negatives, whose gradients are cached (GradCache); needs sentence-transformers.

python sentence_transformer_cached.py
"""

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

model = SentenceTransformer("models/bert")
train_dataset = load_dataset("json", data_files="data/pairs.json", split="train")
loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=4)
args = SentenceTransformerTrainingArguments(output_dir="out", per_device_train_batch_size=16, num_train_epochs=1)
SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss).train()
