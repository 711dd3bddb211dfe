"""Fine-tune a video-language model within max_frames: in full, with LoRA or with QLoRA.

Built-in model and clips of moving shapes, on whatever this machine has:

    accelerate launch --config_file accelerate_configs/cpu.yaml recipes/video_sft.py --preset auto

QLoRA of Qwen2.5-VL-7B on one RTX 4090, at most 64 frames of 224 × 224 pixels:

    accelerate launch --config_file accelerate_configs/rtx_4090.yaml recipes/video_sft.py \\
        --preset rtx_4090 --method qlora --model_name_or_path Qwen/Qwen2.5-VL-7B-Instruct \\
        --dataset_name videos.jsonl --max_frames 64 --max_pixels_per_frame 50176 --output_dir out/qwen-video

A row has `messages` (or another format of recipes/sft.py) with <video> and <image> where they belong, and `videos`,
`images`: paths relative to the data file. The loss is on the answers only. Frames are evenly spaced over the whole
clip, two a second (--video_fps) within --max_frames; a sample that is too long loses frames first, then the end of its
answer. By default the number of frames, their size and the micro-batch are chosen to fit the preset; --video_profile
sets frames, batch and precision together. --packing true packs whole samples into rows of --max_length tokens, without
padding. The vision tower stays frozen, and out of autograd, unless
--no_freeze_vision. A run resumes from the last checkpoint in output_dir. Every field of TrainingArguments is an
argument; --dry_run stops before training.
"""

import sys

from hf_memopt.program import run


def start(argv: list[str] | None):
    """The job: arguments over this recipe's defaults."""
    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe.video import VideoArguments
    from hf_memopt.video.demo_model import builtin_video_model

    defaults = jobs.RecipeDefaults(
        description=__doc__,
        arguments=VideoArguments,
        model=builtin_video_model,
        training={
            "output_dir": "out/video_sft",
            "learning_rate": 1e-5,
            "warmup_steps": 0.03,
            "remove_unused_columns": False,
            "prediction_loss_only": True,
        },
        adapters={"learning_rate": 1e-4},
        builtin={
            "learning_rate": 3e-3,
            "max_steps": 120,
            "eval_steps": 40,
            "save_strategy": "no",
            "activation_checkpointing": False,
            "freeze_vision": False,
            "max_frames": 8,
            "video_fps": None,
            "held_out": 24,
        },
    )
    return jobs.start(defaults, argv)


def main(argv: list[str] | None = None):
    from hf_memopt.recipe.argument_check import check_words

    check_words("VideoArguments", "TrainingArguments", argv)  # before the libraries, whose import takes seconds

    from hf_memopt.recipe import job as jobs
    from hf_memopt.recipe import summary
    from hf_memopt.recipe import video as videos
    from hf_memopt.recipe.resume import checkpoint_to_resume

    job = start(argv)

    # After start(), which sets the environment variables that torch reads once.
    from transformers import AutoModelForImageTextToText

    from hf_memopt.levers.few_logits import with_few_logits
    from hf_memopt.recipe.video_tier import remember_clips
    from hf_memopt.trainer.video_trainer import VideoTrainer
    from hf_memopt.video.collator import VideoCollator, check_packing
    from hf_memopt.video.processor import load_processor

    # ---- errors in the checkpoint, configuration or data show before weights are loaded
    resume = checkpoint_to_resume(job.args)
    config = jobs.load_config(job)
    packing = job.recipe.packing
    if packing:
        check_packing(config)
    processor = load_processor(job.recipe.tokenizer_name or job.model_name, config, job.recipe.trust_remote_code)
    length = jobs.sequence_length(job, config, usual=sys.maxsize)  # frames take what the model has positions for
    train, held_out = videos.load_samples(job, processor, length)
    largest = videos.largest_sample(train)
    job.memory_args = with_few_logits(job.memory_args, config)

    # ---- the model: its tower frozen, its language model and projector trained or adapted
    frozen = job.recipe.frozen
    model = jobs.load_model(job, config, processor.tokenizer, AutoModelForImageTextToText, frozen)
    trainer = VideoTrainer(
        model=model,
        args=job.args,
        train_dataset=train,
        eval_dataset=held_out,
        data_collator=VideoCollator(processor.tokenizer.pad_token_id, separate_media=True, lengths=packing),
        processing_class=processor,
        memory_args=job.memory_args,
        packing=length if packing else None,
    )

    # ---- train, save, report
    rows = videos.budget(train, largest, frozen)
    inputs = videos.packed_inputs(trainer) if packing else videos.real_inputs(largest)
    estimate = summary.announce(job, trainer, length, rows, video=inputs, frozen=frozen)
    if not job.recipe.dry_run:
        remember_clips(job)
        summary.train(job, trainer, resume, estimate, videos.show_answers)
    return trainer


if __name__ == "__main__":
    run(main)
