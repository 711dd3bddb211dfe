#!/bin/bash
nproc_per_node=4
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

NPROC_PER_NODE=$nproc_per_node \
swift sft \
    --model Qwen/Qwen3-8B \
    --tuner_type full \
    --dataset data.jsonl \
    --packing true \
    --attn_impl flash_attn \
    --use_liger_kernel true \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 2 \
    --max_length 8192 \
    --deepspeed zero3 > train.log 2>&1
