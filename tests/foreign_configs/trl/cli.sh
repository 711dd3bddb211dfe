trl sft --model_name_or_path Qwen/Qwen3-0.6B --dataset_name trl-lib/Capybara --packing --max_length 4096 --use_peft
