"""Peak memory of fine-tuning video models: what a plain Trainer takes, and what each measure leaves of it.

Tiny models of three families with a vocabulary of 32,000 are trained with LoRA for two steps on two clips of 64 frames
at once, with a frozen vision tower and activation checkpointing, as recipes usually have it. Measured is the peak of
every live storage of those steps, beside the estimator's prediction, and the losses. Then the same by the number of
frames, with both measures.

    python benchmarks/video.py
"""

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import video_models
import videos
from jobs import CHECKPOINTED, QUIET, lora
from record import record
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments, set_seed

from hf_memopt import MemoryArguments, estimate
from hf_memopt.levers.replaced import put_back
from hf_memopt.recipe.phase_peaks import PhasePeaks
from hf_memopt.recipe.video import real_inputs
from hf_memopt.trainer.video_trainer import VideoTrainer
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.media import Limits
from hf_memopt.video.model_parts import train_parts
from hf_memopt.video.processor import load_processor

FAMILIES = ("qwen2_5_vl", "smolvlm", "llava_onevision")
FRAMES = 64
VOCABULARY = 32_000
FIELDS = {"per_device_train_batch_size": 2, "max_steps": 2, "learning_rate": 1e-3, **CHECKPOINTED}
SETTINGS = {**QUIET, **FIELDS, "logging_strategy": "steps", "logging_steps": 1, "remove_unused_columns": False}
# Name: whether it is VideoTrainer, whether the tower stays out of autograd, its levers.
ROWS = {
    "plain Trainer": (False, False, None),
    "vision out of autograd": (True, True, MemoryArguments()),
    "answer-only logits": (True, False, MemoryArguments(logits_to_keep=True, frozen_without_grad=False)),
    "both": (True, True, MemoryArguments(logits_to_keep=True)),
}
BOTH = ROWS["both"]


class Copies(torch.utils.data.Dataset):
    """One sample, made anew every time."""

    def __init__(self, sample: dict, count: int = 8):
        self.sample, self.count = sample, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict:
        return {name: value.clone() for name, value in self.sample.items()}


def sizes(family: str) -> dict:
    """The same width and depth in each family, and a frame of about 16 tokens."""
    vision = {"hidden_size": 96, "intermediate_size": 288}
    depth = {"num_hidden_layers": 4, "num_attention_heads": 4}
    if family == "qwen2_5_vl":
        depth = {"depth": 4, "num_heads": 4, "fullatt_block_indexes": [3]}
    side = {"smolvlm": 64}.get(family, 112)
    return {"vocab": VOCABULARY, "hidden": 128, "layers": 4, "side": side, "vision": {**vision, **depth}}


def make_sample(folder: Path, frames: int) -> dict:
    clip = folder / f"{frames}.mp4"
    if not clip.exists():
        videos.write(clip, videos.numbered(frames, 112, 112))
    processor = load_processor(str(folder), AutoConfig.from_pretrained(folder))
    question = {"role": "user", "content": "<video>What is moving?"}
    answer = {"role": "assistant", "content": "first red then blue"}
    row = {"messages": [question, answer], "videos": [clip.name]}
    return Encoder(processor, Limits(max_frames=frames), folder)(row)


def measure(folder: Path, sample: dict, ours: bool, outside: bool, memory_args: MemoryArguments | None) -> dict:
    """Bytes at the peak of two steps, predicted bytes, and both losses."""
    set_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    adapted = train_parts(model, lora(16), ("vision",))
    if not outside:
        put_back(model)  # what keeps the tower out of autograd
    peak = PhasePeaks()
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(output, **SETTINGS)
        given = {"model": adapted, "args": args, "train_dataset": Copies(sample), "callbacks": [peak]}
        if ours:
            given |= {"memory_args": memory_args, "data_collator": VideoCollator(0, separate_media=True)}
            trainer = VideoTrainer(**given)
        else:
            trainer = Trainer(data_collator=VideoCollator(0, attention_mask=True), **given)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    row = {"measured_bytes": peak.bytes, "tokens": len(sample["input_ids"]), "losses": losses}
    if ours and outside:
        config = AutoConfig.from_pretrained(folder)
        more = {"memory_args": memory_args, "video": real_inputs(sample), "peft_config": lora(16)}
        found = estimate(config, FIELDS, 8, "cpu", **more, frozen=("vision",))
        row |= {"predicted_bytes": found.peak_allocated_bytes, "error": found.peak_allocated_bytes / peak.bytes - 1}
    return row


def main() -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            place = video_models.make(family, Path(folder) / family, **sizes(family))
            sample = make_sample(place, FRAMES)
            rows = {name: measure(place, sample, *row) for name, row in ROWS.items()}
            plain = rows["plain Trainer"]["measured_bytes"]
            for row in rows.values():
                row["of_plain"] = row["measured_bytes"] / plain
            by_frames = {count: measure(place, make_sample(place, count), *BOTH) for count in (16, 32, 64, 128)}
            results[family] = {"measures": rows, "by_frames": by_frames}
            print(family, {name: round(row["of_plain"], 3) for name, row in rows.items()})
            print(family, {count: (row["measured_bytes"], row["error"]) for count, row in by_frames.items()})
    record("video", results)


if __name__ == "__main__":
    main()
