"""The frames of at most 224 × 224 pixels that are predicted to fit cards of 8, 16 and 24 GB, with QLoRA.

Nothing runs on a card here: every figure is the estimator's, for its share of the card (90 %).

    python benchmarks/video_tiers.py
"""

from record import record

from hf_memopt import MemoryArguments, get_preset
from hf_memopt.cli.estimate import quantization_config
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.reference import job_of
from hf_memopt.estimator.video import VideoInputs
from hf_memopt.planner.frames import most_frames

MODELS = ("qwen2.5-vl-3b", "qwen2.5-vl-7b")
CARDS = ("rtx_3070", "rtx_4080", "rtx_4090")
PIXELS = 224 * 224


def main() -> None:
    rows = []
    for model in MODELS:
        for card in CARDS:
            preset = get_preset(card, "qlora")
            for micro_batch in (1, 4):
                fields = {"per_device_train_batch_size": micro_batch, "activation_checkpointing": True}
                job = job_of(
                    preset, model, None, 1, fields, {}, video=VideoInputs(height=224, width=224), frozen=("vision",),
                    memory_args=MemoryArguments(logits_to_keep=True),
                    quantization_config=quantization_config(preset, {}, load_config(model)),
                )  # fmt: skip
                fit = next(iter(most_frames(job)))
                rows.append({
                    "model": model, "card": card, "micro_batch": micro_batch, "pixels": PIXELS,
                    "max_frames": fit.max_frames, "seq_len": fit.seq_len,
                    "predicted_bytes": fit.estimate.device_bytes, "card_bytes": job.device.memory,
                })  # fmt: skip
                print(rows[-1], flush=True)
    record("video_tiers", "python benchmarks/video_tiers.py", rows)


if __name__ == "__main__":
    main()
