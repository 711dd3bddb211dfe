"""QLoRA with bitsandbytes, in the shape of PEFT's dora_finetuning.py and fp4_finetuning: argparse, one function.

python peft_qlora.py --base_model models/opt --data_path data/train.txt --quantize
"""

import argparse

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def train_model(base_model: str, data_path: str, quantize: bool, use_dora: bool):
    tokenizer = AutoTokenizer.from_pretrained(base_model)
    if quantize:
        model = AutoModelForCausalLM.from_pretrained(
            base_model,
            dtype=torch.bfloat16,
            quantization_config=BitsAndBytesConfig(
                load_in_4bit=True,
                bnb_4bit_compute_dtype=torch.bfloat16,
                bnb_4bit_use_double_quant=True,
                bnb_4bit_quant_type="nf4",
            ),
        )
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=True)
    else:
        model = AutoModelForCausalLM.from_pretrained(base_model)
    lora_config = LoraConfig(
        r=16, target_modules=["q_proj", "v_proj", "out_proj", "fc1", "fc2"], lora_dropout=0.01, use_dora=use_dora
    )
    model = get_peft_model(model, lora_config)
    data = load_dataset("text", data_files=data_path)
    data = data.map(lambda samples: tokenizer(samples["text"]), batched=True)
    trainer = Trainer(
        model=model,
        train_dataset=data["train"],
        args=TrainingArguments(
            per_device_train_batch_size=4,
            gradient_accumulation_steps=4,
            warmup_steps=10,
            max_steps=20,
            learning_rate=3e-4,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            logging_steps=1,
            output_dir="outputs",
        ),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    model.config.use_cache = False
    trainer.train()
    model.save_pretrained("outputs")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune with LoRA and PEFT")
    parser.add_argument("--base_model", type=str, default="huggyllama/llama-7b")
    parser.add_argument("--data_path", type=str, default="guanaco")
    parser.add_argument("--quantize", action="store_true")
    parser.add_argument("--use_dora", action="store_true")
    train_model(**vars(parser.parse_args()))
