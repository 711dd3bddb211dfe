# the server
# CUDA_VISIBLE_DEVICES=7 swift rollout --model Qwen/Qwen2.5-7B-Instruct
CUDA_VISIBLE_DEVICES=0 swift infer --model Qwen/Qwen2.5-7B-Instruct
