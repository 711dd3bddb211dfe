megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2 --micro_batch_size 1
