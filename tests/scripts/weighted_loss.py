"""A Trainer with its own loss, its own optimizer and schedule, and weights of its own; style of forum answers.

python weighted_loss.py
"""

import torch
from datasets import load_dataset
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments


class WeightedLossTrainer(Trainer):
    def __init__(self, *args, class_weights=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_fct = nn.CrossEntropyLoss(weight=class_weights)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")
        loss = self.loss_fct(logits.view(-1, model.config.num_labels), labels.view(-1))
        return (loss, outputs) if return_outputs else loss


tokenizer = AutoTokenizer.from_pretrained("models/bert")
model = AutoModelForSequenceClassification.from_pretrained("models/bert", num_labels=2)
for param in model.bert.embeddings.parameters():
    param.requires_grad = False

data = load_dataset("json", data_files="data/glue.json", split="train")
data = data.map(lambda row: tokenizer(row["sentence"], truncation=True), remove_columns=["sentence"])
no_decay = ["bias", "LayerNorm.weight"]
grouped = [
    {
        "params": [p for n, p in model.named_parameters() if not any(nd in n for nd in no_decay)],
        "weight_decay": 0.01,
    },
    {"params": [p for n, p in model.named_parameters() if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
]
optimizer = torch.optim.RMSprop(grouped, lr=1e-4, momentum=0.9)
scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
trainer = WeightedLossTrainer(
    model=model,
    args=TrainingArguments("weighted", per_device_train_batch_size=8, num_train_epochs=2, logging_steps=1),
    train_dataset=data,
    processing_class=tokenizer,
    optimizers=(optimizer, scheduler),
    class_weights=torch.tensor([0.3, 0.7]),
)
trainer.train()
