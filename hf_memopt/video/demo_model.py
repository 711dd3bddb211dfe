"""The video recipe's default model: a small Qwen2.5-VL with random weights."""

import json
from pathlib import Path

from hf_memopt.data.builtin_model import cached, train_tokenizer
from hf_memopt.video.moving_shapes import COLOURS, QUESTION

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

    tokenizer = _tokenizer()
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


def _tokenizer():
    """A tokenizer that is trained on all answers."""
    texts = [f"{QUESTION}\nfirst {first} then {second}" for first in COLOURS for second in COLOURS]
    return train_tokenizer(texts, 400, list(_SPECIAL_TOKENS), 4096)
