"""DPO of adapters, hard-coded as in TRL's documentation: the reference is the model without them.

python trl_dpo_lora.py
"""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

model = AutoModelForCausalLM.from_pretrained("models/llama", dtype="float32")
tokenizer = AutoTokenizer.from_pretrained("models/llama")
train_dataset = load_dataset("json", data_files="data/preferences.json", split="train")
training_args = DPOConfig(output_dir="llama-dpo", per_device_train_batch_size=2, bf16=False, report_to="none")
trainer = DPOTrainer(
    model=model,
    args=training_args,
    processing_class=tokenizer,
    train_dataset=train_dataset,
    peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
)
trainer.train()
