"""Fine-tune a causal language model on answers: in full, with LoRA or with QLoRA.

Built-in model and questions about the standard library, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py --preset auto

QLoRA of an 8B model on one RTX 4090:

    accelerate launch --config_file accelerate_configs/rtx_4090.yaml recipes/sft.py \\
        --preset rtx_4090 --method qlora --model_name_or_path Qwen/Qwen3-8B \\
        --dataset_name trl-lib/Capybara --output_dir out/qwen-capybara

The data need `messages`, or `conversations`, or `prompt` and `completion`, or `instruction` and `output` (optionally
`input`, `history`), or `text`. `system` and `tools` go to the chat template; rows that cannot be trained on are
refused. The loss is on the answers only (on everything for `text`). --packing packs several rows into a sample,
without padding. A run resumes from the last checkpoint in output_dir. Every field of TrainingArguments is an argument;
--dry_run stops before training.
"""

from hf_memopt.program import run


def main(argv: list[str] | None = None):
    from hf_memopt.data.tokens import answered, packed_answers
    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe import summary
    from hf_memopt.recipe.packing import choose_attention, keep_samples_apart
    from hf_memopt.recipe.resume import checkpoint_to_resume

    defaults = jobs.RecipeDefaults(
        description=__doc__,
        training={"output_dir": "out/sft", "learning_rate": 2e-5, "warmup_steps": 0.03},
        adapters={"learning_rate": 2e-4},
        builtin={"learning_rate": 2e-3, "max_steps": 200, "eval_steps": 50, "save_strategy": "no"},
        padded=True,
    )
    job = jobs.start(defaults, argv)

    # After start(), which sets the environment variables that torch reads once.
    from transformers import DataCollatorForSeq2Seq, default_data_collator

    from hf_memopt import MemoryTrainer

    # ---- errors in the checkpoint, configuration or data show before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    length = jobs.sequence_length(job, config)
    tokenizer = jobs.load_tokenizer(job)
    packing = job.recipe.packing
    encode = packed_answers if packing else answered
    train, held_out = jobs.load_data(job, "builtin:questions", encode, tokenizer, length)
    if packing:
        choose_attention(job)

    # ---- the model, with its adapters
    trainer = MemoryTrainer(
        model=jobs.load_model(job, config, tokenizer),
        args=job.args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=default_data_collator if packing else DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=8),
        processing_class=tokenizer,
        memory_args=job.memory_args,
    )

    if packing:
        keep_samples_apart(trainer)

    # ---- train, save, report
    estimate = summary.announce(job, trainer, length)
    if not job.recipe.dry_run:
        summary.train(job, trainer, resume, estimate)
    return trainer


if __name__ == "__main__":
    run(main)
