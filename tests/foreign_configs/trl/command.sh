export ACCELERATE_LOG_LEVEL=info
accelerate launch --config_file zero3_8.yaml scripts/dpo.py --config handbook_dpo.yaml \
    --max_length 2048 --optim=paged_adamw_8bit
