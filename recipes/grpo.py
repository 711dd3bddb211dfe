"""Train a causal language model with computed rewards (GRPO), with TRL's GRPOTrainer: in full, with LoRA or QLoRA.

Built-in model and sums of two digits, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py --preset auto

QLoRA of an 8B model on one RTX 4090, with transformers' generate():

    accelerate launch --config_file accelerate_configs/rtx_4090.yaml recipes/grpo.py \\
        --preset rtx_4090 --method qlora --model_name_or_path Qwen/Qwen3-8B \\
        --dataset_name sums.jsonl --max_completion_length 512 --output_dir out/qwen-grpo

With vLLM on the card that trains, asleep between generations; --vllm_mode server asks one that runs elsewhere:

    accelerate launch --config_file accelerate_configs/a100_80gb.yaml recipes/grpo.py \\
        --preset a100_80gb --method lora --model_name_or_path Qwen/Qwen3-8B --dataset_name sums.jsonl \\
        --use_vllm true --vllm_gpu_memory_utilization 0.4 --vllm_enable_sleep_mode true

The data need `prompt`, a text or messages, and `completion` with the right answer, whose last number a completion has
to end with. Write your own rewards beside `correct`. A generation batch of per_device_train_batch_size ×
gradient_accumulation_steps × devices completions must hold whole groups of --num_generations. Every field of
GRPOConfig is an argument; --dry_run stops before training and shows what each phase takes. Needs the
extra `trl`.
"""

from hf_memopt.presets.trl_configs import trl_class
from hf_memopt.program import run


def main(argv: list[str] | None = None):
    from hf_memopt.recipe.argument_check import check_words

    check_words("RolloutArguments", "GRPOConfig", argv)  # before the libraries, whose import takes seconds

    from hf_memopt.errors import as_input_error
    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe import prompts, summary
    from hf_memopt.recipe.resume import checkpoint_to_resume

    defaults = jobs.RecipeDefaults(
        description=__doc__,
        arguments=prompts.RolloutArguments,
        config_class=lambda: trl_class("GRPOConfig"),
        training={
            "output_dir": "out/grpo",
            "learning_rate": 1e-6,
            "warmup_steps": 0.1,
            "eval_strategy": "no",
            "eval_on_start": False,
        },
        adapters={"learning_rate": 1e-5},
        builtin={
            "learning_rate": 2e-3,
            "max_steps": 60,
            "save_strategy": "no",
            "logging_steps": 1,
            "per_device_train_batch_size": 16,
            "effective_batch_size": 16,
            "num_generations": 8,
            "max_completion_length": 4,
        },
    )
    job = jobs.start(defaults, argv)

    # After start(), which sets the environment variables that torch reads once.
    from trl import GRPOTrainer

    from hf_memopt import MemoryTrainerMixin

    class MemoryGRPOTrainer(MemoryTrainerMixin, GRPOTrainer):
        """TRL's trainer, whose generation survives running out of memory."""

    # ---- errors in the checkpoint, configuration or data show before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    tokenizer = jobs.load_tokenizer(job)
    train, held_out = prompts.load_prompts(job)

    # ---- the model. TRL adds the adapters, so that the model without them is the reference
    with as_input_error("GRPOTrainer", ImportError):  # of vLLM
        trainer = MemoryGRPOTrainer(
            model=jobs.load_model(job, config, tokenizer, adapters=False),
            reward_funcs=[prompts.correct, prompts.numeric],
            args=job.args,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=tokenizer,
            peft_config=job.peft_config,
            memory_args=job.memory_args,
        )

    # ---- train, save, report
    estimate = summary.announce(job, trainer, jobs.sequence_length(job, config))
    if not job.recipe.dry_run:
        summary.train(job, trainer, resume, estimate, prompts.show_rewards)
    return trainer


if __name__ == "__main__":
    run(main)
