"""Fine-tune a causal language model on answers, with TRL's SFTTrainer: in full, with LoRA or with QLoRA.

Built-in model and questions about the standard library, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/sft.py --preset auto

QLoRA of an 8B model on one RTX 4090:

    accelerate launch --config_file accelerate_configs/rtx_4090.yaml recipes/sft.py \\
        --preset rtx_4090 --method qlora --model_name_or_path Qwen/Qwen3-8B \\
        --dataset_name trl-lib/Capybara --output_dir out/qwen-capybara

The data need `messages`, or `prompt` and `completion`, or `text`, as TRL's dataset formats; `conversations`, and
`instruction` with `output`, become messages. `system` and `tools` go to the chat template; rows that cannot be trained
on are refused. The loss is on the answers only (on everything for `text`). --packing packs several rows into a sample,
without padding. A run resumes from the last checkpoint in output_dir. Every field of SFTConfig is an argument
(--packing_strategy, --loss_type, …); --dry_run stops before training. Needs the extra `trl`.
"""

from hf_memopt.presets.trl_configs import trl_class
from hf_memopt.program import run


def main(argv: list[str] | None = None):
    from hf_memopt.recipe.argument_check import check_words

    check_words("AnswerArguments", "SFTConfig", argv)  # before the libraries, whose import takes seconds

    from hf_memopt.errors import as_input_error
    from hf_memopt.recipe import answers, summary
    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe.packing import keep_samples_apart
    from hf_memopt.recipe.resume import checkpoint_to_resume

    defaults = jobs.RecipeDefaults(
        description=__doc__,
        arguments=answers.AnswerArguments,
        config_class=lambda: trl_class("SFTConfig"),
        training={"output_dir": "out/sft", "learning_rate": 2e-5, "warmup_steps": 0.03},
        adapters={"learning_rate": 2e-4},
        builtin={"learning_rate": 2e-3, "max_steps": 200, "eval_steps": 50, "save_strategy": "no"},
        task="sft",
    )
    job = jobs.start(defaults, argv)

    # After start(), which sets the environment variables that torch reads once.
    from trl import SFTTrainer

    from hf_memopt import MemoryTrainerMixin

    class MemorySFTTrainer(MemoryTrainerMixin, SFTTrainer):
        """TRL's trainer, which survives running out of memory."""

    # ---- errors in the checkpoint, configuration or data show before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    length = job.args.max_length = jobs.sequence_length(job, config)
    tokenizer = jobs.load_tokenizer(job)
    train, held_out = answers.load_answers(job, tokenizer)

    # ---- the model, with its adapters
    model = jobs.load_model(job, config, tokenizer)
    with as_input_error("SFTTrainer", ValueError):
        trainer = MemorySFTTrainer(
            model=model,
            args=job.args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            memory_args=job.memory_args,
        )
    answers.check_samples(job, trainer, None if job.recipe.streaming else len(train))
    keep_samples_apart(trainer)

    # ---- train, save, report
    estimate = summary.announce(job, trainer, length)
    if not job.recipe.dry_run:
        summary.train(job, trainer, resume, estimate)
    return trainer


if __name__ == "__main__":
    run(main)
