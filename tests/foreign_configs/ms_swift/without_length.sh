swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --dataset swift/self-cognition#1000
