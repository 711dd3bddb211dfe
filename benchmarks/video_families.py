"""Every model type that takes videos, tried: PYTHONPATH=.venv/torchvision python benchmarks/video_families.py

A tiny model of each type of AutoModelForImageTextToText that has a video processor is made from its classes' defaults,
two rows with clips of different lengths are encoded and collated as the recipe does, and a step is taken with the
vision tower frozen. A row of the result says whether that works, or the sentence with which it is refused.

Args: model types, to try only these and write nothing.
"""

import copy
import sys
import tempfile
import traceback
from pathlib import Path

import torchvision_operators  # noqa: F401
import numpy
import torch
from record import record
from tiny_video_settings import SETTINGS
from tiny_video_models import make_config, make_processor, video_types
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_memopt.errors import InputError, one_line
from hf_memopt.video.collator import VideoCollator
from hf_memopt.video.encoder import Encoder
from hf_memopt.video.families import fit_to_model, model_class
from hf_memopt.video.media import Limits
from hf_memopt.video.model_parts import take_videos_of_any_length, train_parts

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'video' %}VIDEO"
    "{% elif part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
LENGTHS = (6, 4)


def write_frames(folder: Path) -> list[dict]:
    """Rows whose clips are folders of frames."""
    from PIL import Image

    rows, random = [], numpy.random.default_rng(0)
    for number, length in enumerate(LENGTHS):
        clip = folder / f"clip{number}"
        clip.mkdir()
        for frame in range(length):
            Image.fromarray(random.integers(0, 255, (56, 56, 3), numpy.uint8)).save(clip / f"{frame}.png")
        messages = [{"role": "user", "content": "<video>What moves?"}, {"role": "assistant", "content": "a dot"}]
        rows.append({"messages": messages, "videos": [clip.name]})
    return rows


def attempt(kind: str, rows: list[dict], folder: Path) -> dict:
    """A row of the result."""
    try:
        return {"model_type": kind, "outcome": "works", **step(kind, rows, folder)}
    except InputError as error:
        return {"model_type": kind, "outcome": "refused", "reason": one_line(error)}
    except LookupError as error:
        return {"model_type": kind, "outcome": "not made", "reason": one_line(error)}


def step(kind: str, rows: list[dict], folder: Path) -> dict:
    """What a training step on the rows gives.

    Raises:
        InputError: the type is refused.
    """
    model_class(CONFIG_MAPPING[kind]())
    settings = copy.deepcopy(SETTINGS.get(kind, {}))
    changes, ids = settings.pop("config", {}), settings.pop("ids", {})
    video, image = settings.pop("places", ("{token}", "{token}"))
    processor = make_processor(kind, settings)
    config = make_config(kind, processor, changes, ids)
    template = TEMPLATE
    for medium, place in (("video", video), ("image", image)):
        token = getattr(processor, f"{medium}_token", "")
        template = template.replace(medium.upper(), place.format(token=token))
    processor.chat_template = template
    fit_to_model(processor, config)
    encode = Encoder(processor, Limits(max_frames=8), folder)
    samples = [encode(row) for row in rows]
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    take_videos_of_any_length(model)
    model = train_parts(model, None, ("vision",))
    collate = VideoCollator(processor.tokenizer.pad_token_id)
    together = model(**collate(samples)).loss
    together.backward()
    return {"tokens": [len(sample["input_ids"]) for sample in samples], "loss": float(together.detach())}


def main(argv: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rows = write_frames(Path(folder))
        results = []
        for kind in argv or video_types():
            try:
                results.append(attempt(kind, rows, Path(folder)))
            except Exception as error:
                if argv:
                    traceback.print_exc()
                results.append({"model_type": kind, "outcome": "failed", "reason": f"{type(error).__name__}: {one_line(error)}"})
            print(results[-1], flush=True)
    if not argv:
        record("video_families", "python benchmarks/video_families.py", results)


if __name__ == "__main__":
    main(sys.argv[1:])
