"""Knowledge distillation: a Trainer that holds a second, frozen model, in a widespread shape.

python distillation.py
"""

import torch
import torch.nn.functional as F
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)


class DistillationTrainingArguments(TrainingArguments):
    def __init__(self, *args, alpha=0.5, temperature=2.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.alpha = alpha
        self.temperature = temperature


class DistillationTrainer(Trainer):
    def __init__(self, *args, teacher_model=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher_model
        self._move_model_to_device(self.teacher, self.model.device)
        self.teacher.eval()

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        student_output = model(**inputs)
        with torch.no_grad():
            teacher_output = self.teacher(**inputs)
        loss_function = torch.nn.KLDivLoss(reduction="batchmean")
        soft = F.log_softmax(student_output.logits / self.args.temperature, dim=-1)
        target = F.softmax(teacher_output.logits / self.args.temperature, dim=-1)
        distilled = loss_function(soft, target) * self.args.temperature**2
        loss = self.args.alpha * student_output.loss + (1.0 - self.args.alpha) * distilled
        return (loss, student_output) if return_outputs else loss


teacher_id = "models/bert"
tokenizer = AutoTokenizer.from_pretrained(teacher_id)
teacher = AutoModelForSequenceClassification.from_pretrained(teacher_id, num_labels=2)
student = AutoModelForSequenceClassification.from_config(
    AutoConfig.from_pretrained(teacher_id, num_labels=2, num_hidden_layers=3)
)
dataset = load_dataset("json", data_files="data/glue.json", split="train")
dataset = dataset.map(lambda rows: tokenizer(rows["sentence"], truncation=True), batched=True)
trainer = DistillationTrainer(
    student,
    DistillationTrainingArguments("distilled", per_device_train_batch_size=8, alpha=0.5, temperature=4.0),
    teacher_model=teacher,
    train_dataset=dataset,
    data_collator=DataCollatorWithPadding(tokenizer=tokenizer),
    processing_class=tokenizer,
)
trainer.train()
