"""A tiny model of any type that takes videos, with its processor, from the classes' own defaults."""

import copy
import inspect
import re

import transformers
from tiny_models import tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING_NAMES

# Special tokens that the processors of a type name literally.
_LITERAL = re.compile(r"""["'](<[^<>\s"']{1,40}>|\[[A-Z_]{3,20}\])["']""")
# Attributes that processors read off a tokenizer, as the published ones have them.
_NAMED = (
    *("image_token", "video_token", "audio_token", "boi_token", "eoi_token", "boa_token", "eoa_token"),
    *("image_start_token", "image_end_token", "slice_start_token", "slice_end_token"),
    *("image_id_start_token", "image_id_end_token", "vision_start_token", "vision_end_token"),
    *("start_image_token", "end_image_token", "context_image_token"),
)
_SIDE = 56
_PATCH = 14


def video_types() -> list[str]:
    """The model types of AutoModelForImageTextToText that have a video processor."""
    return sorted(kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if _takes_videos(kind))


def _takes_videos(kind: str) -> bool:
    name = PROCESSOR_MAPPING_NAMES.get(kind)
    parts = getattr(transformers, name).get_attributes() if name else ()
    return kind in VIDEO_PROCESSOR_MAPPING_NAMES or "video_processor" in parts


def make_tokenizer(*classes: type) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with every special token that the classes name."""
    sources = [inspect.getsource(inspect.getmodule(part)) for part in classes]
    literal = [token for source in sources for token in _LITERAL.findall(source)]
    named = {name: f"<{name}>" for name in _NAMED}
    special = ["<pad>", "<eos>", *dict.fromkeys([*named.values(), *literal])]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: index for index, token in enumerate([*special, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=named,
        additional_special_tokens=list(dict.fromkeys(literal)),
    )


def make_processor(kind: str, **settings):
    """A type's processor with small sizes.

    Args:
        settings: the processor's own arguments, and `video` and `image`: those of its parts.
    """
    name = PROCESSOR_MAPPING_NAMES.get(kind)
    if name is None:
        raise LookupError("transformers has no processor for it")
    processor_class = getattr(transformers, name)
    image, video = settings.pop("image", {}), settings.pop("video", {})
    parts = {}
    for part in processor_class.get_attributes():
        if part == "image_processor":
            parts[part] = getattr(transformers, IMAGE_PROCESSOR_MAPPING_NAMES[kind]["torchvision"])(**image)
        elif part == "video_processor":
            parts[part] = getattr(transformers, _video_processor(kind))(**video)
        elif part == "feature_extractor":
            parts[part] = getattr(transformers, FEATURE_EXTRACTOR_MAPPING_NAMES[kind])()
        else:
            parts[part] = make_tokenizer(processor_class)
    return processor_class(**parts, **settings)


def _video_processor(kind: str) -> str:
    shared = {"diffusion_gemma": "gemma4", "glm4v_moe": "glm4v", "qwen3_vl_moe": "qwen3_vl"}
    return VIDEO_PROCESSOR_MAPPING_NAMES[shared.get(kind, kind)]["torchvision"]


def make_config(kind: str, processor, changes: dict | None = None):
    """A type's tiny configuration with the token ids of its processor.

    Args:
        changes: values by dotted names, of the sizes that go together.
    """
    made = tiny_config(CONFIG_MAPPING[kind])
    values = made.to_dict()
    values.pop("model_type", None)
    _put_token_ids(values, processor)
    for name, value in (changes or {}).items():
        target = values
        *path, last = name.split(".")
        for part in path:
            target = target[part]
        target[last] = copy.deepcopy(value)
    return type(made)(**values)


def _put_token_ids(values: dict, processor) -> None:
    tokenizer = processor.tokenizer
    for name, value in [(k, v) for k, v in values.items() if isinstance(k, str)]:
        if isinstance(value, dict):
            _put_token_ids(value, processor)
        elif name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            values[name] = tokenizer.pad_token_id if name == "pad_token_id" else tokenizer.eos_token_id
        elif name.endswith(("_token_id", "_token_index")):
            stem = name.removesuffix("_id").removesuffix("_index")
            token = getattr(processor, stem, None) or getattr(tokenizer, stem, None)
            if isinstance(token, str):
                values[name] = tokenizer.convert_tokens_to_ids(token)
