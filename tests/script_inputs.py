"""The tiny models and data that the scripts in tests/scripts read: python tests/script_inputs.py FOLDER

Every text has the same number of words, a word is a token, and every image and clip has the same size: then the
largest batch, for which the estimate is, is the one that two steps of a real run train on.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

WORDS = [f"word{number}" for number in range(480)]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<mask>", "<cls>", "<sep>", "|", "<image>", "user", "assistant"]
SPECIAL += [f"<extra_id_{number}>" for number in range(10)]
ROWS, LENGTH = 64, 48
CHAT = (
    "{% for message in messages %}{{ message['role'] }} {% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image> {% else %}"
    "{{ part['text'] }} {% endif %}{% endfor %}{% endif %} </s> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TEXT = {"vocab_size": len(WORDS) + len(SPECIAL), "max_position_embeddings": 256}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {"hidden_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 256}
DECODER = {**ENCODER, **TEXT, **TOKENS, "num_key_value_heads": 2}
SEQ2SEQ = {
    **{"d_model": 96, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "decoder_start_token_id": 2},
    **TOKENS,
    "forced_eos_token_id": 2,
}
VISION = {**ENCODER, "image_size": 64, "patch_size": 8}
SPEECH = {"conv_dim": (32, 32, 32), "conv_stride": (5, 4, 4), "conv_kernel": (10, 3, 3), "num_feat_extract_layers": 3}
BACKBONE = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "layer_type": "basic"}
DETECTOR = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
QUERIES = {"num_queries": 12, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
# name -> (model type, configuration, class)
MODELS = {
    "gpt2": (
        "gpt2",
        {**TOKENS, "vocab_size": TEXT["vocab_size"], "n_embd": 96, "n_head": 4, "n_layer": 8, "n_positions": 256},
        "GPT2LMHeadModel",
    ),
    "llama": ("llama", DECODER, "LlamaForCausalLM"),
    "mistral": ("mistral", {**DECODER, "sliding_window": None}, "MistralForCausalLM"),
    "opt": (
        "opt",
        {**DECODER, "ffn_dim": 256, "word_embed_proj_dim": 96, "max_position_embeddings": 256},
        "OPTForCausalLM",
    ),
    "bert": ("bert", {**ENCODER, **TEXT, "pad_token_id": 0}, "BertForMaskedLM"),
    "roberta": ("roberta", {**ENCODER, **TEXT, **TOKENS}, "RobertaForMaskedLM"),
    "deberta-v2": (
        "deberta-v2",
        {**ENCODER, **TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 32},
        "DebertaV2ForMaskedLM",
    ),
    "xlnet": (
        "xlnet",
        {"vocab_size": TEXT["vocab_size"], "d_model": 96, "n_layer": 4, "n_head": 4, "d_inner": 256},
        0,
    ),
    "t5": (
        "t5",
        {
            **{"vocab_size": TEXT["vocab_size"], "d_model": 96, "d_kv": 24, "d_ff": 256, "num_heads": 4},
            **{"num_layers": 4, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 0},
        },
        "T5ForConditionalGeneration",
    ),
    "bart": ("bart", {**SEQ2SEQ, **TEXT}, "BartForConditionalGeneration"),
    "marian": ("marian", {**SEQ2SEQ, **TEXT, "decoder_vocab_size": TEXT["vocab_size"]}, "MarianMTModel"),
    "vit": ("vit", VISION, "ViTForImageClassification"),
    "vit-mae": (
        "vit_mae",
        {**VISION, "decoder_hidden_size": 64, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 4}
        | {"decoder_intermediate_size": 128},
        "ViTMAEForPreTraining",
    ),
    "yolos": ("yolos", {**VISION, "image_size": [64, 64], "num_detection_tokens": 12}, "YolosForObjectDetection"),
    "segformer": (
        "segformer",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 64},
        "SegformerForSemanticSegmentation",
    ),
    "wav2vec2": (
        "wav2vec2",
        {**ENCODER, **SPEECH, "vocab_size": TEXT["vocab_size"], "pad_token_id": 0, "ctc_loss_reduction": "mean"}
        | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        "Wav2Vec2ForCTC",
    ),
    "whisper": (
        "whisper",
        {**SEQ2SEQ, "vocab_size": TEXT["vocab_size"], "num_mel_bins": 16, "max_source_positions": 100}
        | {
            "max_target_positions": 64,
            "decoder_start_token_id": 1,
            "suppress_tokens": [],
            "begin_suppress_tokens": [],
        },
        "WhisperForConditionalGeneration",
    ),
    "clip": (
        "clip",
        {"text_config": {**ENCODER, **TEXT, **TOKENS}, "vision_config": VISION, "projection_dim": 48},
        "CLIPModel",
    ),
    "llava": (
        "llava",
        {
            "text_config": {"model_type": "llama", **DECODER},
            "vision_config": {"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3},
            "image_token_index": SPECIAL.index("<image>"),
            "image_seq_length": 64,
        },
        "LlavaForConditionalGeneration",
    ),
}


def main(folder: Path, models: Iterable[str] = MODELS) -> None:
    """Write models/ and data/ into a folder."""
    import torch

    torch.manual_seed(0)
    for name in models:
        _save_model(name, folder / "models" / name)
    (folder / "data").mkdir()
    _write_texts(folder / "data")
    if models is MODELS:
        _write_images(folder / "data" / "images")


def _save_model(name: str, folder: Path) -> None:
    import transformers

    kind, fields, class_name = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **fields)
    config.architectures = [class_name or "XLNetLMHeadModel"]
    getattr(transformers, config.architectures[0])(config).save_pretrained(folder)
    images = {"size": {"height": 64, "width": 64}, "crop_size": {"height": 64, "width": 64}, "do_center_crop": False}
    processors = {
        "vit": "ViTImageProcessor",
        "vit-mae": "ViTImageProcessor",
        "yolos": "YolosImageProcessor",
        "segformer": "SegformerImageProcessor",
        "clip": "CLIPImageProcessor",
        "llava": "CLIPImageProcessor",
    }
    if name == "wav2vec2":
        transformers.Wav2Vec2FeatureExtractor(feature_size=1).save_pretrained(folder)
    elif name == "whisper":
        extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=2, hop_length=160, n_fft=400)
        extractor.save_pretrained(folder)
    elif name in processors:
        size = {"shortest_edge": 64, "longest_edge": 64} if name == "yolos" else images["size"]
        getattr(transformers, processors[name])(**{**images, "size": size}).save_pretrained(folder)
    if name not in ("vit", "vit-mae", "yolos", "segformer"):
        _tokenizer(encoder=name in ("bert", "roberta", "deberta-v2", "xlnet")).save_pretrained(folder)


def _tokenizer(encoder: bool):
    """A word is a token. Encoders get <cls> before and <sep> behind a text, and <sep> between two."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    from hf_memopt.stack.versions import has

    vocabulary = {word: number for number, word in enumerate(SPECIAL + WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if encoder:
        ends = [(name, vocabulary[name]) for name in ("<cls>", "<sep>")]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=ends
        )
    names = {f"{name}_token": f"<{name}>" for name in ("pad", "unk", "mask", "cls", "sep")}
    extra = [token for token in SPECIAL if token.startswith(("<extra", "<image"))]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT,
        model_max_length=128,
        **{"extra_special_tokens" if has("transformers", "5.0") else "additional_special_tokens": extra},
        **names,
    )


def _sentence(row: int, words: int = LENGTH) -> str:
    return " ".join(WORDS[(row * 7 + number * (1 + row % 5)) % len(WORDS)] for number in range(words))


def _message(role: str, row: int) -> list[dict]:
    return [{"role": role, "content": _sentence(row, LENGTH // 2)}]


def _write_texts(folder: Path) -> None:
    half = LENGTH // 2
    rows = {
        "glue": [{"sentence": _sentence(n), "label": n % 2} for n in range(ROWS)],
        "swag": [
            {"startphrase": _sentence(n, half), "label": n % 4}
            | {f"ending{end}": _sentence(n + end + 1, half) for end in range(4)}
            for n in range(ROWS)
        ],
        "ner": [
            {"tokens": _sentence(n).split(), "ner_tags": [(n + word) % 3 for word in range(LENGTH)]}
            for n in range(ROWS)
        ],
        "qa": [
            {"question": _sentence(n, 8), "context": _sentence(n + 1, 40), "start": n % 30, "answer": _sentence(n, 3)}
            for n in range(ROWS)
        ],
        "pairs": [{"source": _sentence(n), "target": _sentence(n + 1, half)} for n in range(ROWS)],
        "chat": [{"messages": _message("user", n) + _message("assistant", n + 1)} for n in range(ROWS)],
        "preferences": [
            {"prompt": _message("user", n)}
            | {name: _message("assistant", n + place) for place, name in enumerate(("chosen", "rejected"))}
            for n in range(ROWS)
        ],
        "feedback": [
            {"prompt": _message("user", n), "completion": _message("assistant", n + 1), "label": n % 2 == 0}
            for n in range(ROWS)
        ],
    }
    (folder / "train.txt").write_text("".join(f"{_sentence(n)}\n" for n in range(ROWS * 4)))
    for name, values in rows.items():
        (folder / f"{name}.json").write_text("".join(json.dumps(row) + "\n" for row in values))


def _write_images(folder: Path) -> None:
    """An imagefolder of two classes, with a caption, boxes and a mask for each image."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for split in ("cats", "dogs"):
        (folder / split).mkdir(parents=True)
        for number in range(ROWS // 2):
            pixels = generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / f"{number:02}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
