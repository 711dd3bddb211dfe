"""The video recipe's defaults: a small Qwen2.5-VL with random weights, and short real clips of a moving shape."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy

from hf_memopt.data.builtin_model import cached, train_tokenizer

_VERSION = 1  # raise it when anything below changes: it invalidates cached folders
_SPECIAL_TOKENS = (
    "<|end|>",
    "<|pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
)
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}<|vision_start|><|{{ part.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SIZE = {"shortest_edge": 28 * 28 * 4, "longest_edge": 56 * 56}  # pixels of a frame: four tokens for every two frames


def builtin_video_model() -> Path:
    """The folder with config, weights, tokenizer and processor; created in the cache on first use."""
    return cached(f"builtin-video-{_VERSION}", _make)


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    # A tokenizer that is trained on all answers.
    texts = [f"{QUESTION}\nfirst {first} then {second}" for first in COLOURS for second in COLOURS]
    tokenizer = train_tokenizer(texts, 400, list(_SPECIAL_TOKENS), 4096)
    tokenizer.save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(_config(tokenizer), trust_remote_code=False).save_pretrained(folder)
    settings = {
        "processor_class": "Qwen2_5_VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": _SIZE},
        "video_processor": {
            "video_processor_type": "Qwen2VLVideoProcessor",
            "size": _SIZE,
            "cap_pixels_per_frame": False,
        },
    }
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")


def _config(tokenizer):
    from transformers import Qwen2_5_VLConfig

    token_id = tokenizer.convert_tokens_to_ids
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            # With the usual 0.02 a model this small learns the form of answers, but not to use the image.
            "initializer_range": 0.1,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "initializer_range": 0.1,
        },
        initializer_range=0.1,
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
    )


COLOURS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230), "yellow": (230, 220, 40)}
_SHAPES = ("square", "disc", "bar")
_DIRECTIONS = {"right": (1, 0), "left": (-1, 0), "down": (0, 1), "up": (0, -1)}
_LENGTHS = (8, 13, 24, 40)  # frames
_SIDE = 64  # pixels
_BACKGROUND = 20  # of 255: a dark grey
_CLIPS = 120
_CLIPS_VERSION = 1  # raise it when anything below changes: it invalidates cached folders
QUESTION = "Which colours does the shape have?"


def moving_shapes() -> Path:
    """A jsonl file of rows, with the videos beside it; created in the cache on first use."""
    return cached(f"moving-shapes-{_CLIPS_VERSION}", _make_clips) / "rows.jsonl"


def _make_clips(folder: Path) -> None:
    rows = []
    for number in range(_CLIPS):
        random = numpy.random.default_rng(number)
        first, second = random.choice(list(COLOURS), 2, replace=False)
        shape, direction = random.choice(_SHAPES), random.choice(list(_DIRECTIONS))
        frames = int(random.choice(_LENGTHS))
        name = f"{number:03d}.mp4"
        write_video(folder / name, draw_frames(shape, direction, (first, second), frames, random))
        turns = [("user", f"<video>{QUESTION}"), ("assistant", f"first {first} then {second}")]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns], "videos": [name]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def draw_frames(shape: str, direction: str, colours: tuple[str, str], frames: int, random) -> Iterator[numpy.ndarray]:
    """Square frames, uint8 (height, width, 3): a shape crosses a dark background; brightness varies from clip to
    clip."""
    brightness, half = random.uniform(0.8, 1.1), _SIDE * random.uniform(0.28, 0.36)
    down, across = numpy.mgrid[:_SIDE, :_SIDE]
    for index in range(frames):
        offset = (index / max(1, frames - 1) - 0.5) * (_SIDE - half)
        x, y = (_SIDE / 2 + step * offset for step in _DIRECTIONS[direction])
        inside = {
            "square": (abs(across - x) < half) & (abs(down - y) < half),
            "disc": (across - x) ** 2 + (down - y) ** 2 < half**2,
            "bar": (abs(across - x) < half / 2) & (abs(down - y) < half),
        }[shape]
        frame = numpy.full((_SIDE, _SIDE, 3), _BACKGROUND, numpy.uint8)
        colour = COLOURS[colours[0] if index < frames / 2 else colours[1]]
        frame[inside] = numpy.clip(numpy.array(colour) * brightness, 0, 255)
        yield frame


def write_video(path: Path, frames) -> None:
    """Encode uint8 frames (height, width, 3) as an mp4 file of ten a second."""
    import av

    with av.open(str(path), "w") as container:
        stream = None
        for frame in frames:
            if stream is None:
                stream = container.add_stream("libx264", rate=10)
                stream.height, stream.width, stream.pix_fmt = *frame.shape[:2], "yuv420p"
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
