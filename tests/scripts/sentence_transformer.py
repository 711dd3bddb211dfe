"""Training of a sentence-transformers model; needs the package.

python sentence_transformer.py
"""

from datasets import load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss

model = SentenceTransformer("models/bert")
train_dataset = load_dataset("json", data_files="data/pairs.json", split="train")
loss = MultipleNegativesRankingLoss(model)
args = SentenceTransformerTrainingArguments(output_dir="out", per_device_train_batch_size=8, num_train_epochs=1)
trainer = SentenceTransformerTrainer(model=model, args=args, train_dataset=train_dataset, loss=loss)
trainer.train()
model.save_pretrained("out/final")
