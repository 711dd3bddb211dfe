"""Pretrain a causal language model on text, from scratch or from existing weights.

Built-in model and text, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/pretrain.py --preset auto

From scratch on a data set larger than memory, eight GPUs:

    accelerate launch --config_file accelerate_configs/h100_80gb_x8_zero3.yaml recipes/pretrain.py \\
        --preset h100_80gb_x8 --config_name Qwen/Qwen3-0.6B --tokenizer_name Qwen/Qwen3-0.6B \\
        --dataset_name HuggingFaceFW/fineweb-edu --streaming --max_steps 10000 --output_dir out/qwen

Texts are packed into blocks without padding. The data need a column `text`; recipes/sft.py trains on answers. A run
resumes from the last checkpoint in output_dir. Every field of TrainingArguments is an argument; --dry_run stops before
training.
"""

from hf_memopt.program import run


def main(argv: list[str] | None = None):
    from hf_memopt.recipe.argument_check import check_words

    check_words("RecipeArguments", "TrainingArguments", argv)  # before the libraries, whose import takes seconds

    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe import summary
    from hf_memopt.recipe.resume import checkpoint_to_resume
    from hf_memopt.recipe.rows import load_texts

    defaults = jobs.RecipeDefaults(
        description=__doc__,
        training={"output_dir": "out/pretrain", "learning_rate": 3e-4, "warmup_steps": 0.05, "weight_decay": 0.1},
        builtin={"learning_rate": 3e-3, "max_steps": 200, "eval_steps": 50, "save_strategy": "no"},
        scratch=True,
    )
    job = jobs.start(defaults, argv)

    # After start(), which sets the environment variables that torch reads once.
    from transformers import default_data_collator

    from hf_memopt import MemoryTrainer

    # ---- errors in the checkpoint, configuration or data show before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    length = jobs.sequence_length(job, config)
    tokenizer = jobs.load_tokenizer(job)
    train, held_out, length = load_texts(job, tokenizer, length)

    # ---- the model, with its adapters
    trainer = MemoryTrainer(
        model=jobs.load_model(job, config, tokenizer),
        args=job.args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=default_data_collator,
        processing_class=tokenizer,
        memory_args=job.memory_args,
    )

    # ---- train, save, report
    estimate = summary.announce(job, trainer, length)
    if not job.recipe.dry_run:
        summary.train(job, trainer, resume, estimate)
    return trainer


if __name__ == "__main__":
    run(main)
