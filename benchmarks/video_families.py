"""Every model type that takes videos, tried: PYTHONPATH=.venv/torchvision python benchmarks/video_families.py

A tiny model of each type of AutoModelForImageTextToText that has a video processor is made from its classes' defaults.
Rows with clips of different lengths and sizes are encoded, collated and trained on for a step as the recipe does it,
with the vision tower frozen. A row of the result says whether that works, also with an image or a second video beside
the first, or the sentence with which it is refused. The loss of a batch must be that of its samples one by one, and
depend on the pixels.

Args: model types, to try only these and write nothing.
"""

import copy
import sys
import tempfile
from pathlib import Path

import numpy
import torch
import torchvision_operators  # noqa: F401
import yaml
from jobs import CHECKPOINTED, QUIET
from record import record
from tiny_video_models import make_config, make_processor, video_types
from transformers import AutoModelForImageTextToText, TrainingArguments
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_memopt import MemoryArguments
from hf_memopt.data.tokens import IGNORED
from hf_memopt.errors import InputError, one_line
from hf_memopt.levers.few_logits import with_few_logits
from hf_memopt.trainer.video_trainer import VideoTrainer
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.media import Limits
from hf_memopt.video.model_parts import frozen_parts, take_videos_of_any_length, train_parts
from hf_memopt.video.processor import fit_to_model, model_class

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'video' %}VIDEO"
    "{% elif part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
SETTINGS = yaml.safe_load((Path(__file__).parent / "data" / "tiny_video_settings.yaml").read_text())["types"]
CLIPS = ((6, 56, 84), (4, 70, 56))  # frames, height, width
# Media of a row beside its first video, by what the result calls it.
MIXED = {"image": {"images": ["picture.png"]}, "second_video": {"videos": ["clip1"]}}
TOLERANCE = 1e-4  # of losses that differ by the order of float32 sums
FIELDS = {**QUIET, **CHECKPOINTED, "per_device_train_batch_size": 2, "max_steps": 1, "remove_unused_columns": False}
FIELDS |= {"logging_strategy": "steps", "logging_steps": 1}


def write_media(folder: Path) -> None:
    """Clips that are folders of frames, and a picture."""
    from PIL import Image

    random = numpy.random.default_rng(0)

    def picture(height: int, width: int):
        return Image.fromarray(random.integers(0, 255, (height, width, 3), numpy.uint8))

    for number, (frames, height, width) in enumerate(CLIPS):
        clip = folder / f"clip{number}"
        clip.mkdir()
        for frame in range(frames):
            picture(height, width).save(clip / f"{frame}.png")
    picture(60, 80).save(folder / "picture.png")


def make_row(videos: list[str], images: list[str] | None = None) -> dict:
    tags = "<video>" * len(videos) + "<image>" * len(images or ())
    messages = [{"role": "user", "content": f"{tags}What moves?"}, {"role": "assistant", "content": "a dot"}]
    return {"messages": messages, "videos": videos, "images": images or []}


def attempt(kind: str, folder: Path) -> dict:
    """A row of the result."""
    try:
        return {"model_type": kind, "outcome": "works", **try_type(kind, folder)}
    except InputError as error:
        return {"model_type": kind, "outcome": "refused", "reason": one_line(error)}


def try_type(kind: str, folder: Path) -> dict:
    """What training on the rows gives.

    Raises:
        InputError: the type is refused.
        AssertionError: it trains on something else than the rows.
    """
    model_class(CONFIG_MAPPING[kind]())
    settings = copy.deepcopy(SETTINGS.get(kind, {}))
    changes, ids = settings.pop("config", {}), settings.pop("ids", {})
    places = settings.pop("places", ("{token}", "{token}"))
    processor = make_processor(kind, settings)
    processor.chat_template = chat_template(processor, *places)
    config = make_config(kind, processor, changes, ids)
    fit_to_model(processor, config)
    encode = Encoder(processor, Limits(max_frames=8), folder)
    samples = [encode(make_row([f"clip{number}"])) for number in range(len(CLIPS))]
    collate = VideoCollator(processor.tokenizer.pad_token_id)

    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    take_videos_of_any_length(model)
    model = train_parts(model, None, ("vision",))
    loss = check_losses(model, collate, samples)
    row = {"tokens": [len(sample["input_ids"]) for sample in samples], "loss": loss}
    for name, more in MIXED.items():
        row[name] = try_mixed(model, collate, encode, samples[0], more)
    step = take_step(model, samples, collate.pad_token_id)
    assert abs(step / loss - 1) < TOLERANCE, f"loss {step} in the Trainer, {loss} of the model"
    return row


def chat_template(processor, video: str, image: str) -> str:
    """A chat template that writes the places of media as the type's published one does."""
    tokens = {kind: getattr(processor, f"{kind}_token", "") for kind in ("video", "image")}
    template = TEMPLATE.replace("VIDEO", video.format(token=tokens["video"]))
    return template.replace("IMAGE", image.format(token=tokens["image"]))


@torch.no_grad()
def check_losses(model, collate: VideoCollator, samples: list[dict]) -> float:
    """The loss of samples together, which is that of each alone and changes with the pixels."""
    together = float(model(**collate(samples)).loss)
    alone = [float(model(**collate([sample])).loss) for sample in samples]
    answers = [int((sample["labels"][1:] != IGNORED).sum()) for sample in samples]
    mean = sum(loss * count for loss, count in zip(alone, answers, strict=True)) / sum(answers)
    assert abs(together / mean - 1) < TOLERANCE, f"loss {together} together, {mean} of each alone"
    for name in (name for name in samples[-1] if name.startswith("pixel_values")):
        pixels = samples[-1][name]
        negative = [-one for one in pixels] if isinstance(pixels, list) else -pixels  # SmolVLM drops blank frames
        other = {**samples[-1], name: negative}
        assert float(model(**collate([other])).loss) != alone[-1], f"the loss does not depend on {name}"
    return together


def try_mixed(model, collate, encode, sample: dict, more: dict) -> str:
    """ "works" for a row with further media in a batch with a sample of one video, or why it is refused."""
    try:
        mixed = encode(make_row(["clip0", *more.get("videos", [])], more.get("images")))
    except InputError as error:
        return one_line(error)
    check_losses(model, collate, [sample, mixed])
    return "works"


def take_step(model, samples: list[dict], pad_token_id: int) -> float:
    """The loss of the recipe's step."""
    with tempfile.TemporaryDirectory() as output:
        trainer = VideoTrainer(
            model=model,
            args=TrainingArguments(output, **FIELDS),
            train_dataset=samples,
            data_collator=VideoCollator(pad_token_id, separate_media=True),
            memory_args=with_few_logits(MemoryArguments(), model.config),
        )
        trainer.train()
    assert "vision" in frozen_parts(model), "the vision tower is trained"
    return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)


def attempts(kinds: list[str]) -> list[dict]:
    """A row of the result for each type.

    Raises:
        Exception: a type neither trains nor is refused.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_media(Path(folder))
        rows = []
        for kind in kinds:
            rows.append(attempt(kind, Path(folder)))
            print(rows[-1], flush=True)
        return rows


def main(argv: list[str]) -> None:
    rows = attempts(argv or video_types())
    if not argv:
        record("video_families", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
