PROMPT="First line.
#### 42"
swift pt --model Qwen/Qwen3-0.6B --tuner_type full --system "$PROMPT" --max_length 512 --optim adamw_torch
