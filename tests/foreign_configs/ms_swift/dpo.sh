NPROC_PER_NODE=2 swift rlhf --rlhf_type dpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora \
  --max_length 2048 --per_device_train_batch_size 1 --gradient_accumulation_steps 8 --rpo_alpha 0.1
