"""A Trainer script that does not know hf_memopt: the DeepSpeed and accelerate files are copied beside it.

torchrun --nproc_per_node 8 plain_script.py --deepspeed zero3.json --model_name Qwen/Qwen3-0.6B --texts my_texts.jsonl
"""

from dataclasses import dataclass

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


@dataclass
class Job:
    model_name: str
    texts: str


args, job = HfArgumentParser((TrainingArguments, Job)).parse_args_into_dataclasses()  # before the model, for ZeRO-3
tokenizer = AutoTokenizer.from_pretrained(job.model_name)
model = AutoModelForCausalLM.from_pretrained(job.model_name)
rows = load_dataset("json", data_files=job.texts, split="train")
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=1024), remove_columns="text")
trainer = Trainer(model, args, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows)
trainer.train()
