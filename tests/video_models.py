"""Tiny video models of six families, each a folder as on the hub: configuration, weights, tokenizer, processor."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

_SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<image>",
    "<video>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    "<img>",
    "</img>",
    "<IMG_CONTEXT>",
)
_WORDS = (
    "What is moving? first red then green blue yellow square. You are provided the following series of frames "
    "from a video. Frame1: Time 0.5s: <0.5 seconds> Describe both videos and the picture."
)
_PATCH = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
_QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}


def chat_template(video: str, image: str) -> str:
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'video' %}"
        + video
        + "{% elif part.type == 'image' %}"
        + image
        + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer(**extra) -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        [_WORDS] * 4,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens=extra
    )


class _Parts:
    """What the families share; sizes may be changed before make()."""

    def __init__(self, vocab=None, hidden=64, layers=2, side=56, vision=None, **special):
        self.tokens = tokenizer(**special)
        self.id = self.tokens.convert_tokens_to_ids
        self.side, self.vision, self.hidden = side, vision or {}, hidden
        self.text = {
            "vocab_size": vocab or len(self.tokens),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32768,
            "bos_token_id": None,
            "eos_token_id": self.tokens.eos_token_id,
            "pad_token_id": self.tokens.pad_token_id,
        }

    def qwen(self, rope: dict, **text) -> dict:
        return {
            "text_config": {
                **self.text,
                **text,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, **rope},
            },
            "image_token_id": self.id("<|image_pad|>"),
            "video_token_id": self.id("<|video_pad|>"),
            "vision_start_token_id": self.id("<|vision_start|>"),
            "vision_end_token_id": self.id("<|vision_end|>"),
        }


def _sections(head: int) -> list[int]:
    part = head // 2 * 3 // 8
    return [head // 2 - 2 * part, part, part]


def qwen2_5_vl(**sizes):
    from transformers import Qwen2_5_VLConfig

    parts = _Parts(**sizes)
    config = Qwen2_5_VLConfig(
        vision_config={
            **_QWEN_VISION,
            **_PATCH,
            "window_size": 56,
            "out_hidden_size": parts.hidden,
            "fullatt_block_indexes": [1],
            **parts.vision,
        },
        **parts.qwen({"mrope_section": _sections(parts.hidden // 4)}),
    )
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": parts.side * parts.side}
    return (
        config,
        parts.tokens,
        "Qwen2_5_VLProcessor",
        "Qwen2VLImageProcessor",
        {
            "video_processor": {
                "video_processor_type": "Qwen2VLVideoProcessor",
                "size": size,
                "cap_pixels_per_frame": False,
            },
            "image_processor": {"size": size},
        },
        ("<|vision_start|><|video_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"),
    )


def qwen3_vl(**sizes):
    from transformers import Qwen3VLConfig

    parts = _Parts(**sizes)
    rope = {"mrope_section": _sections(parts.hidden // 4), "mrope_interleaved": True}
    config = Qwen3VLConfig(
        vision_config={
            **_QWEN_VISION,
            **_PATCH,
            "patch_size": 16,
            "out_hidden_size": parts.hidden,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0],
            **parts.vision,
        },
        **parts.qwen(rope, head_dim=parts.hidden // 4),
    )
    size = {"shortest_edge": 4096, "longest_edge": 64 * 64 * 64}
    return (
        config,
        parts.tokens,
        "Qwen3VLProcessor",
        "Qwen2VLImageProcessor",
        {
            "video_processor": {
                "video_processor_type": "Qwen3VLVideoProcessor",
                "size": size,
                "cap_pixels_per_frame": False,
            },
            "image_processor": {"size": {"shortest_edge": 4096, "longest_edge": 64 * 64}, "patch_size": 16},
        },
        ("<|vision_start|><|video_pad|><|vision_end|>", "<|vision_start|><|image_pad|><|vision_end|>"),
    )


def smolvlm(**sizes):
    from transformers import SmolVLMConfig

    parts = _Parts(**{"side": 64, **sizes})
    vision = {**_VISION, "image_size": parts.side, "patch_size": 8, **parts.vision}
    config = SmolVLMConfig(
        text_config={"model_type": "llama", **parts.text},
        vision_config=vision,
        scale_factor=2,
        image_token_id=parts.id("<image>"),
        pad_token_id=parts.tokens.pad_token_id,
    )
    side = {"longest_edge": parts.side}
    return (
        config,
        parts.tokens,
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        {
            "video_processor": {
                "video_processor_type": "SmolVLMVideoProcessor",
                "size": side,
                "max_image_size": side,
                "do_sample_frames": False,
                "num_frames": 64,
                "fps": 1,
            },
            "image_processor": {"size": side, "max_image_size": side, "do_image_splitting": False},
            "image_seq_len": (parts.side // vision["patch_size"]) ** 2 // 4,
        },
        ("<video>", "<image>"),
    )


def llava_onevision(**sizes):
    from transformers import LlavaOnevisionConfig

    parts = _Parts(**sizes)
    vision = {
        "model_type": "siglip_vision_model",
        **_VISION,
        "image_size": parts.side,
        "patch_size": 14,
        "vision_use_head": False,
        **parts.vision,
    }
    config = LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **parts.text},
        vision_config=vision,
        image_token_index=parts.id("<image>"),
        video_token_index=parts.id("<video>"),
        image_grid_pinpoints=[[parts.side, parts.side]],
    )
    size = {"height": parts.side, "width": parts.side}
    return (
        config,
        parts.tokens,
        "LlavaOnevisionProcessor",
        "LlavaOnevisionImageProcessor",
        {
            "video_processor": {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": size},
            "image_processor": {"size": size, "image_grid_pinpoints": [[parts.side, parts.side]]},
            "num_image_tokens": (parts.side // 14) ** 2,
            "vision_feature_select_strategy": "full",
        },
        ("<video>", "<image>"),
    )


def video_llama_3(**sizes):
    from transformers import VideoLlama3Config

    parts = _Parts(**sizes)
    config = VideoLlama3Config(
        text_config={"model_type": "qwen2", **parts.text},
        vision_config={**_VISION, "patch_size": 14, **parts.vision},
        image_token_id=parts.id("<|image_pad|>"),
        video_token_id=parts.id("<|video_pad|>"),
    )
    size = {"shortest_edge": 28 * 28 * 4, "longest_edge": 64 * parts.side * parts.side}
    return (
        config,
        parts.tokens,
        "VideoLlama3Processor",
        "VideoLlama3ImageProcessor",
        {
            "video_processor": {"video_processor_type": "VideoLlama3VideoProcessor", "size": size},
            "image_processor": {"size": {"shortest_edge": 28 * 28 * 4, "longest_edge": parts.side * parts.side}},
        },
        ("<|video_pad|>", "<|image_pad|>"),
    )


def internvl(**sizes):
    from transformers import InternVLConfig

    parts = _Parts(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
        **sizes,
    )
    side = [parts.side, parts.side]
    tokens = (parts.side // 14) ** 2 // 4
    config = InternVLConfig(
        text_config={"model_type": "qwen2", **parts.text},
        image_token_id=parts.id("<IMG_CONTEXT>"),
        image_seq_length=tokens,
        vision_config={**_VISION, "image_size": side, "patch_size": [14, 14], **parts.vision},
    )
    size = {"height": parts.side, "width": parts.side}
    return (
        config,
        parts.tokens,
        "InternVLProcessor",
        "GotOcr2ImageProcessor",
        {
            "video_processor": {"video_processor_type": "InternVLVideoProcessor", "size": size},
            "image_processor": {"size": size},
            "image_seq_length": tokens,
        },
        ("<video>", "<IMG_CONTEXT>"),
    )


def qwen2_vl(**sizes):
    from transformers import Qwen2VLConfig

    config, tokens, _, images, settings, places = qwen2_5_vl(**sizes)
    text = config.text_config.to_dict()
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": text["hidden_size"], "num_heads": 2, **_PATCH}
    ids = {name: getattr(config, name) for name in ("image_token_id", "video_token_id")}
    text["model_type"] = "qwen2_vl_text"
    return (
        Qwen2VLConfig(text_config=text, vision_config=vision, **ids),
        tokens,
        "Qwen2VLProcessor",
        images,
        settings,
        places,
    )


def qwen3_vl_moe(**sizes):
    from transformers import Qwen3VLMoeConfig

    config, tokens, processor, images, settings, places = qwen3_vl(**sizes)
    text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
    text |= {
        "model_type": "qwen3_vl_moe_text",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }
    ids = {name: getattr(config, name) for name in ("image_token_id", "video_token_id")}
    moe = Qwen3VLMoeConfig(text_config=text, vision_config={**vision, "model_type": "qwen3_vl_moe"}, **ids)
    return moe, tokens, processor, images, settings, places


MORE = {made.__name__: made for made in (qwen2_vl, qwen3_vl_moe)}  # variants of those below
FAMILIES = {made.__name__: made for made in (qwen2_5_vl, qwen3_vl, smolvlm, llava_onevision, video_llama_3, internvl)}


def make(name: str, folder: Path, weights: bool = True, **sizes) -> Path:
    """Write a tiny model of a family to a folder, and return it."""
    config, tokens, processor, images, settings, places = {**MORE, **FAMILIES}[name](**sizes)
    tokens.save_pretrained(folder)
    settings["image_processor"]["image_processor_type"] = images
    (folder / "processor_config.json").write_text(json.dumps({**settings, "processor_class": processor}))
    (folder / "chat_template.jinja").write_text(chat_template(*places))
    config.save_pretrained(folder)
    if weights:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
