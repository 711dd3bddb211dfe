import sys

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling, Trainer

from hf_memopt import get_preset

model_name, texts = sys.argv[1:3]  # e.g. Qwen/Qwen3-0.6B my_texts.jsonl
preset = get_preset("auto")
args = preset.training_arguments(output_dir="out", learning_rate=2e-5, max_steps=int([*sys.argv, "-1"][3]))
tokenizer = AutoTokenizer.from_pretrained(model_name)
model = AutoModelForCausalLM.from_pretrained(model_name, **preset.model_kwargs())
rows = load_dataset("json", data_files=texts, split="train")
rows = rows.map(lambda row: tokenizer(row["text"], truncation=True, max_length=preset.seq_len))
trainer = Trainer(model, args, DataCollatorForLanguageModeling(tokenizer, mlm=False), rows)
trainer.train()
