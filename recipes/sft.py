"""Fine-tune a causal language model on answers: in full, with LoRA or with QLoRA.

Built-in model and questions about the standard library, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py --preset auto

QLoRA of an 8B model on one RTX 4090:

    accelerate launch --config_file accelerate_configs/rtx_4090.yaml recipes/sft.py \\
        --preset rtx_4090 --method qlora --model_name_or_path Qwen/Qwen3-8B \\
        --dataset_name trl-lib/Capybara --output_dir out/qwen-capybara

The data need `messages`, or `conversations`, or `prompt` and `completion`, or `instruction` and `output` (and perhaps
`input`, `history`), or `text`. `system` and `tools` go to the chat template; what cannot be trained on is refused. The
loss is on the answers alone (on everything for `text`). --packing puts several rows into a
sample, without padding. A run goes on from the last checkpoint in output_dir. Every field of TrainingArguments is an
argument; --dry_run only shows.
"""

from hf_memopt.program import run


def main(argv: list[str] | None = None):
    from hf_memopt.data.tokens import answered, packed_answers
    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe import summary
    from hf_memopt.recipe.resume import checkpoint_to_resume

    job = jobs.start(
        __doc__,
        argv,
        output_dir="out/sft",
        learning_rate=2e-5,
        warmup_steps=0.03,
        padded=True,
        adapters={"learning_rate": 2e-4},
        builtin={"learning_rate": 2e-3, "max_steps": 200, "eval_steps": 50, "save_strategy": "no"},
    )

    from transformers import (
        DataCollatorForSeq2Seq,
        default_data_collator,
    )  # after start(), which sets what torch reads once

    from hf_memopt import MemoryTrainer

    # ---- whatever is wrong with checkpoint, configuration or data shows before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    length = jobs.sequence_length(job, config)
    tokenizer = jobs.load_tokenizer(job)
    packing = job.recipe.packing
    encode = packed_answers if packing else answered
    train, held_out = jobs.load_data(job, "builtin:questions", encode, tokenizer, length)

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

    # ---- train, save, report
    estimated = summary.announce(job, trainer, length)
    if not job.recipe.dry_run:
        summary.train(job, trainer, resume, tokenizer, estimated)
    return trainer


if __name__ == "__main__":
    run(main)
