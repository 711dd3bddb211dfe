NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --tuner_type full \
  --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --sleep_level 1 \
  --max_length 1024 --max_completion_length 1024 --num_generations 8 --reward_funcs accuracy \
  --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --beta 0.001 --deepspeed zero2
