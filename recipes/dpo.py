"""Train a causal language model on preferences (DPO), with TRL's DPOTrainer: in full, with LoRA or with QLoRA.

Built-in model and pairs of a documented answer and a guess, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/dpo.py --preset auto

QLoRA of an 8B model on one RTX 4090; the reference is the model without its adapters:

    accelerate launch --config_file accelerate_configs/rtx_4090.yaml recipes/dpo.py \\
        --preset rtx_4090 --method qlora --model_name_or_path Qwen/Qwen3-8B \\
        --dataset_name trl-lib/ultrafeedback_binarized --output_dir out/qwen-dpo

All weights of a small model on an A100, without a second copy of them for the reference:

    accelerate launch --config_file accelerate_configs/a100_80gb.yaml recipes/dpo.py \\
        --preset a100_80gb --model_name_or_path Qwen/Qwen3-1.7B --precompute_ref_log_probs true \\
        --dataset_name trl-lib/ultrafeedback_binarized --output_dir out/qwen-dpo-full

The data need `chosen` and `rejected`, texts or messages, and `prompt` unless both begin with it. A micro-batch of N
pairs runs 2N sequences. In full, the reference is a copy of the model on the same device, unless its log-probabilities
are computed before training. A run resumes from the last checkpoint in output_dir. Every field of DPOConfig is an
argument (--beta, --loss_type, …); --dry_run stops before training. Needs the extra `trl`.
"""

from hf_memopt.presets.trl_configs import trl_class
from hf_memopt.program import run


def main(argv: list[str] | None = None):
    from hf_memopt.recipe.argument_check import check_words

    check_words("PreferenceArguments", "DPOConfig", argv)  # before the libraries, whose import takes seconds

    from hf_memopt.recipe import answers, preference, summary
    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe.resume import checkpoint_to_resume

    defaults = jobs.RecipeDefaults(
        description=__doc__,
        arguments=preference.PreferenceArguments,
        config_class=lambda: trl_class("DPOConfig"),
        training={"output_dir": "out/dpo", "learning_rate": 1e-6, "warmup_steps": 0.1},
        adapters={"learning_rate": 1e-5},
        builtin={
            "learning_rate": 2e-4,
            "max_steps": 40,
            "eval_steps": 10,
            "save_strategy": "no",
            "max_length": 64,
        },
    )
    job = jobs.start(defaults, argv)

    # After start(), which sets the environment variables that torch reads once.
    from trl import DPOTrainer

    from hf_memopt import MemoryTrainerMixin

    class MemoryDPOTrainer(MemoryTrainerMixin, DPOTrainer):
        """TRL's trainer, which survives running out of memory."""

    # ---- errors in the checkpoint, configuration or data show before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    length = job.args.max_length = jobs.sequence_length(job, config)
    tokenizer = jobs.load_tokenizer(job)
    train, held_out = preference.load_pairs(job, tokenizer)

    # ---- the model. TRL adds the adapters, so that the model without them is the reference
    trainer = MemoryDPOTrainer(
        model=jobs.load_model(job, config, tokenizer, adapters=False),
        args=job.args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=tokenizer,
        peft_config=job.peft_config,
        memory_args=job.memory_args,
    )

    answers.check_samples(job, trainer, len(train))

    # ---- train, save, report
    estimate = summary.announce(job, trainer, length)
    if not job.recipe.dry_run:
        summary.train(job, trainer, resume, estimate, preference.show_rewards)
    return trainer


if __name__ == "__main__":
    run(main)
