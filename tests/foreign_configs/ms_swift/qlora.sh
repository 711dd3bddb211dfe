swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type lora --quant_method bnb --quant_bits 4 \
  --bnb_4bit_compute_dtype bfloat16 --bnb_4bit_use_double_quant true --max_length 2048
