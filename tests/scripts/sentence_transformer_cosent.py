"""Embeddings of pairs with a score (CoSENT); needs sentence-transformers.

python sentence_transformer_cosent.py
"""

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CoSENTLoss

model = SentenceTransformer("models/roberta")
pairs = load_dataset("json", data_files="data/pairs.json", split="train")
train_dataset = pairs.add_column("score", [number % 5 / 4 for number in range(len(pairs))])
args = SentenceTransformerTrainingArguments(
    output_dir="out", per_device_train_batch_size=8, num_train_epochs=1, gradient_checkpointing=True
)
SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=CoSENTLoss(model)).train()
