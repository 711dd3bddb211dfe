"""Supervised fine-tuning of a vision-language model with a collator of the script's own, as TRL's sft_vlm.py and the
cookbooks around it.

python trl_sft_vlm.py
"""

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlavaProcessor,
    Trainer,
    TrainingArguments,
)

model_id = "models/llava"
tokenizer = AutoTokenizer.from_pretrained(model_id)
processor = LlavaProcessor(
    AutoImageProcessor.from_pretrained(model_id),
    tokenizer,
    patch_size=8,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
    chat_template=tokenizer.chat_template,
)
model = AutoModelForImageTextToText.from_pretrained(model_id)
peft_config = LoraConfig(r=16, lora_alpha=32, target_modules=r".*language_model.*\.(q|k|v|o)_proj", bias="none")
model = get_peft_model(model, peft_config)
model.print_trainable_parameters()


def format_data(sample):
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "word1 word2 word3"}]}
    answer = {"role": "assistant", "content": [{"type": "text", "text": f"word{sample['label']}"}]}
    return [question, answer]


def collate_fn(examples):
    texts = [processor.apply_chat_template(format_data(example), tokenize=False) for example in examples]
    images = [example["image"].convert("RGB") for example in examples]
    batch = processor(text=texts, images=images, return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    labels[labels == processor.tokenizer.pad_token_id] = -100
    labels[labels == processor.tokenizer.convert_tokens_to_ids("<image>")] = -100
    batch["labels"] = labels
    return batch


args = TrainingArguments(
    output_dir="vlm-sft",
    num_train_epochs=1,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    activation_checkpointing=True,
    remove_unused_columns=False,
    report_to="none",
)
dataset = load_dataset("imagefolder", data_dir="data/images", split="train")
Trainer(model=model, args=args, train_dataset=dataset, data_collator=collate_fn).train()
