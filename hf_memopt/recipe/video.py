"""The video recipe's own arguments, its samples, and its answers about them."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import send_to_device

from hf_memopt.compatibility import resolve_engine
from hf_memopt.data.sample_batches import packed_batches
from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError, choose
from hf_memopt.recipe.auto import plans_here
from hf_memopt.recipe.job import Job
from hf_memopt.recipe.recipe_arguments import Parsed, RecipeArguments
from hf_memopt.recipe.rows import load_job_rows
from hf_memopt.recipe.video_tier import choose_clips
from hf_memopt.video.collator import TOKENS, VideoCollator
from hf_memopt.video.demo_model import moving_shapes
from hf_memopt.video.downloads import Downloads
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.frame_cache import FrameCache
from hf_memopt.video.inputs import VideoInputs
from hf_memopt.video.media import Limits
from hf_memopt.video.samples import BadVideos, VideoSamples

_GLANCED_AT = 500  # rows whose files are looked at for the largest sample

# The command line and a file override them.
PROFILES: dict[str, dict[str, Any]] = {
    "maximum_savings": {
        "max_frames": 50,
        "per_device_train_batch_size": 2,
        "effective_batch_size": 32,
        "activation_checkpointing": True,
    },
    "balanced": {
        "max_frames": 100,
        "per_device_train_batch_size": 4,
        "effective_batch_size": 32,
        "activation_checkpointing": True,
    },
    "maximum_performance": {
        "max_frames": None,
        "video_fps": None,
        "per_device_train_batch_size": 8,
        "effective_batch_size": 32,
        "activation_checkpointing": False,
        "dtype": "float32",
    },
}


@dataclass
class VideoArguments(RecipeArguments):
    """The video recipe's own arguments."""

    OR_NONE: ClassVar = (
        "max_frames",
        "video_fps",
        "max_pixels_per_frame",
        "max_video_tokens",
        "max_download_mib",
        "frame_cache_gib",
    )

    packing: bool = field(
        default=False, metadata={"help": "Pack whole samples into rows of max_length tokens, without padding."}
    )
    video_profile: str | None = field(
        default=None,
        metadata={
            "help": "maximum_savings (50 frames, micro-batch 2), balanced (100 frames, micro-batch 4), or "
            "maximum_performance (all frames, micro-batch 8, float32 weights, nothing recomputed). "
            "Default: frames, their size and micro-batch that are predicted to fit the preset."
        },
    )
    max_frames: int | None = field(
        default=100,
        metadata={
            "help": "Frames of a video, evenly spaced over all of it, at most; none: no limit. Default: as many "
            "as are predicted to fit the preset; 100 where that is not predicted."
        },
    )
    video_fps: float | None = field(
        default=2.0,
        metadata={
            "help": "Frames a second, within max_frames; at least 4 of a clip. none: as many as max_frames allows. "
            "A row's own `fps` or `nframes` goes over it."
        },
    )
    max_pixels_per_frame: int | None = field(
        default=None,
        metadata={
            "help": "Height × width of a frame, at most; none: the model's own. Default: what is predicted to "
            "fit the preset."
        },
    )
    max_video_tokens: int | None = field(
        default=None, metadata={"help": "Tokens of a sample's videos and images; frames are dropped to keep to it."}
    )
    freeze_vision: bool = field(default=True, metadata={"help": "Leave the vision tower as it is, out of autograd."})
    freeze_projector: bool = field(
        default=False, metadata={"help": "Leave the layers between tower and language model as they are."}
    )
    max_bad_videos: int = field(
        default=0, metadata={"help": "Files without a frame that may be skipped; one more ends the run with its name."}
    )
    media_folder: str | None = field(
        default=None, metadata={"help": "Where relative paths start. Default: the data file's folder."}
    )
    max_download_mib: float | None = field(
        default=None,
        metadata={
            "help": "MiB of a video or image that a row names by http(s) address, at most; it is kept in "
            "output_dir/downloads. Default: such rows are refused."
        },
    )
    frame_cache_gib: float | None = field(
        default=None,
        metadata={
            "help": "GiB of decoded frames to keep in output_dir/frame_cache, at most, so that later epochs read "
            "them; the least recently used give way. Default: videos are decoded in each epoch."
        },
    )

    @classmethod
    def profile_of(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The settings of the profile that was asked for; the balanced one where none was.

        Raises:
            InputError: an unknown profile.
        """
        name = values.get("video_profile") or "balanced"
        if name not in PROFILES:
            raise choose("video_profile", name, PROFILES)
        return PROFILES[name]

    @staticmethod
    def prepare(job: Job, training: dict[str, Any], parsed: Parsed, own_model: bool) -> dict[str, Any]:
        """The job with its weights in half precision, and with clips that fit; the demo's are small as they are.

        Args:
            training: the TrainingArguments fields so far.
            own_model: the model is the user's.

        Returns:
            TrainingArguments fields that a plan decides.

        Raises:
            InputError: float16 weights that are trained in full, or a model of which no clip fits.
        """
        with_weights_dtype(job)
        if job.recipe.packing:
            prepare_packing(job, training)
        return choose_clips(job, training, parsed) if own_model else {}

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parts that are not trained."""
        return ("vision",) * self.freeze_vision + ("projector",) * self.freeze_projector


def with_weights_dtype(job: Job) -> None:
    """Put a job's weights into half precision, as the profiles say, where the card computes in bf16.

    Raises:
        InputError: float16 weights would be trained in full: without a scaler for their gradients they end in NaN.
    """
    recipe, preset = job.recipe, job.preset
    if recipe.dtype == "float16" and preset.method == "full":
        raise InputError(
            "dtype=float16 with method=full: updates below 6e-8 vanish and losses end in NaN: use bfloat16 or "
            "float32, or method=lora on float16 weights"
        )
    if recipe.dtype is None and preset.method == "full" and preset.precision == "bf16":
        job.preset = replace(preset, dtype="bfloat16")


def prepare_packing(job: Job, training: dict[str, Any]) -> None:
    """A micro-batch of one packed row, unless more were asked for; max_length says how long it is.

    Raises:
        InputError: without max_length, and with what does not go with packing.
    """
    if job.recipe.max_length is None:
        raise InputError("packing: set max_length, the tokens of a packed row")
    if plans_here(job.recipe.preset):
        raise InputError("packing: --preset auto does not plan packed rows; name a preset (hf-memopt presets)")
    if training.get("train_sampling_strategy", "random") not in ("random", None):
        raise InputError(
            f"packing already decides which samples are together: leave "
            f"train_sampling_strategy={training['train_sampling_strategy']} out"
        )
    for name in ("max_tokens_per_batch", "max_batch_size", "sparse_block_size", "sliding_window"):
        if (value := getattr(job.memory_args, name)) is not None:
            raise InputError(f"packing and {name}={value} do not go together: use one of them")
    if training.get("per_device_train_batch_size") is None:
        training["per_device_train_batch_size"] = 1


def load_samples(job: Job, processor, length: int) -> tuple[VideoSamples, VideoSamples | None]:
    """Training and held-out samples, decoded when they are asked for.

    Args:
        length: tokens of a sample, at most.
    """
    recipe = job.recipe
    if recipe.streaming:
        raise InputError("streaming: videos are read one by one anyway; leave it out")
    source = recipe.dataset_name or str(moving_shapes())
    limits = Limits(recipe.max_frames, recipe.video_fps, recipe.max_pixels_per_frame, recipe.max_video_tokens, length)
    path = Path(source).expanduser()
    folder = Path(recipe.media_folder).expanduser() if recipe.media_folder else path.parent if path.is_file() else path
    if recipe.media_folder and not folder.is_dir():
        raise InputError(f"media_folder={recipe.media_folder}: no such folder")
    out = Path(job.args.output_dir)
    downloads = None if recipe.max_download_mib is None else Downloads(out / "downloads", recipe.max_download_mib)
    cache = None if recipe.frame_cache_gib is None else FrameCache(out / "frame_cache", recipe.frame_cache_gib)
    encode = Encoder(processor, limits, folder if folder.is_dir() else Path(), downloads, cache)
    with job.args.main_process_first(desc="preparing data"):
        *parts, _ = load_job_rows(job, source, lambda *rows: encode.check, with_media=True)
    bad = BadVideos(out / "bad_videos.txt", recipe.max_bad_videos)
    train, held_out = (rows and VideoSamples(rows, encode, bad, f"{source}: row") for rows in parts)
    return train, held_out


def largest_sample(samples: VideoSamples) -> dict[str, torch.Tensor]:
    """The sample that takes most, among the first few hundred: found by the files' headers, then made.

    Files that are not there, or no videos, show here, before anything is trained.

    Raises:
        BadVideo: more of them than may be.
    """
    sizes = samples.sizes(_GLANCED_AT)
    return samples[max(range(len(sizes)), key=sizes.__getitem__)]


def budget(samples: VideoSamples, sample: dict[str, torch.Tensor], frozen: tuple[str, ...]) -> list[tuple[str, str]]:
    """The sizes of the largest sample on its way: frames or patches, tokens, bytes."""
    pixels = [
        part
        for name, value in sample.items()
        if name.startswith("pixel_values")
        for part in (value if isinstance(value, list) else [value])
    ]
    rows = sum(part.shape[0] if part.dim() < 5 else part.shape[0] * part.shape[1] for part in pixels)
    size = sum(part.numel() * part.element_size() for part in pixels)
    what = "patches" if pixels and pixels[0].dim() == 2 else "frames"
    limit, tokens = samples.encode.limits.max_frames, len(sample["input_ids"])
    answers = int((sample["labels"] != IGNORED).sum())
    sizes = f"{rows:,} {what} ({size / 2**20:.1f} MiB) → {tokens:,} tokens, {answers} of them answers"
    return [
        ("videos", f"at most {limit or 'all'} frames; the largest sample: {sizes}"),
        ("frozen", ", ".join(frozen) or "nothing"),
    ]


def packed_inputs(trainer) -> VideoInputs:
    """The largest packed batch of a trainer as what estimate() takes, from its files' headers."""
    indices = packed_batches(trainer.get_train_dataloader()).largest()
    samples = [trainer.train_dataset.outline(index) for index in indices]
    return VideoInputs(packed=trainer.joined(trainer.data_collator(samples)))


def real_inputs(sample: dict[str, Any]) -> VideoInputs:
    """A sample as what estimate() takes, with its pixels' shapes alone."""

    def shape_alone(value):
        if isinstance(value, list):
            return [shape_alone(part) for part in value]
        return value.to("meta") if value.is_floating_point() and value.dim() > 1 else value

    return VideoInputs(sample={name: shape_alone(value) for name, value in sample.items()})


def show_answers(job: Job, trainer) -> None:
    """Print answers to a few held-out videos beside the true ones, on the first process."""
    args, held_out = job.args, trainer.eval_dataset
    if args.process_index or held_out is None or not job.recipe.samples or not resolve_engine(args).plain:
        return
    model = trainer.accelerator.unwrap_model(trainer.model).eval()
    print("samples, of rows held out: the right answer → the model's")
    for number in range(min(job.recipe.samples, len(held_out))):
        reply, expected = answer(model, trainer.processing_class.tokenizer, held_out[number])
        print(f"  {' '.join(expected.split())!r} → {' '.join(reply.split())!r}")


def answer(model, tokenizer, sample: dict[str, torch.Tensor], tokens: int = 40) -> tuple[str, str]:
    """Return what a model says to a sample's first question, and what the sample says to it."""
    labels = sample["labels"]
    first = int((labels != IGNORED).nonzero()[0])
    prompt = {name: value[:first] if name in TOKENS else value for name, value in sample.items()}
    inputs = VideoCollator(tokenizer.pad_token_id, pad_to_multiple_of=1)([prompt])
    del inputs["labels"]
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs = send_to_device(inputs, model.device)
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id)[0]
    reply = tokenizer.decode(ids[first:], skip_special_tokens=True)
    return reply, tokenizer.decode(labels[labels != IGNORED], skip_special_tokens=True)
