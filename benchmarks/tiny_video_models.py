"""A tiny model of any type that takes videos, with its processor, from the classes' own defaults."""

import copy
import inspect
import re

import transformers
from huggingface_hub.errors import StrictDataclassError
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
_LITERAL = re.compile(r"""["'](<[^<>\s"']{1,40}>|\]<\][^"'<>]{1,20}\[>\[)["']""")
# Tokens that processors read off the tokenizer alone, and those for which they have a literal to fall back on.
_READ = re.compile(r"tokenizer\.(\w+_token)\b")
_OPTIONAL = re.compile(r"""(?:has|get)attr\(tokenizer, ["'](\w+_token)["']""")


def video_types() -> list[str]:
    """The model types of AutoModelForImageTextToText that have a video processor."""
    return sorted(kind for kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if _takes_videos(kind))


def _takes_videos(kind: str) -> bool:
    name = PROCESSOR_MAPPING_NAMES.get(kind)
    parts = getattr(transformers, name).get_attributes() if name else ()
    return kind in VIDEO_PROCESSOR_MAPPING_NAMES or "video_processor" in parts


def make_tokenizer(processor_class: type, extra: dict[str, str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with every special token that a processor names.

    Args:
        extra: further tokens by the names under which the processor reads them.
    """
    source = inspect.getsource(inspect.getmodule(processor_class))
    literal = list(dict.fromkeys(_LITERAL.findall(source)))
    read = set(_READ.findall(source)) - set(_OPTIONAL.findall(source)) - {"bos_token", "eos_token", "pad_token"}
    named = {name: f"<{name}>" for name in sorted(read)} | extra
    special = ["<pad>", "<eos>", *dict.fromkeys([*named.values(), *literal])]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({token: index for index, token in enumerate([*special, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        extra_special_tokens=named,
    )


def make_processor(kind: str, settings: dict):
    """A type's processor with small sizes.

    Args:
        settings: the processor's own arguments; `video` and `image`: those of its parts; `tokens`: of its tokenizer.
    """
    settings = dict(settings)
    processor_class = getattr(transformers, settings.pop("processor", PROCESSOR_MAPPING_NAMES.get(kind)))
    image, video, tokens = (settings.pop(part, {}) for part in ("image", "video", "tokens"))
    parts = {}
    for part in processor_class.get_attributes():
        if part == "image_processor":
            made = _mapped(IMAGE_PROCESSOR_MAPPING_NAMES, kind)
            parts[part] = getattr(transformers, made.get("torchvision") or made["pil"])(**image)
        elif part == "video_processor":
            made = _mapped(VIDEO_PROCESSOR_MAPPING_NAMES, kind)
            parts[part] = getattr(transformers, made["torchvision"])(**video)
        elif part == "feature_extractor":
            parts[part] = getattr(transformers, _mapped(FEATURE_EXTRACTOR_MAPPING_NAMES, kind))()
        else:
            parts[part] = make_tokenizer(processor_class, tokens)
    return processor_class(**parts, **settings)


def _mapped(names: dict, kind: str):
    """What transformers has for a type, or for another with the same processor."""
    processor = PROCESSOR_MAPPING_NAMES.get(kind)
    shared = [other for other, name in PROCESSOR_MAPPING_NAMES.items() if name == processor]
    return next(names[other] for other in (kind, *shared) if names.get(other))


def make_config(kind: str, processor, changes: dict, ids: dict[str, str]):
    """A type's tiny configuration with the token ids of its processor.

    Args:
        changes: values by dotted names, of the sizes that go together.
        ids: special tokens by the names of the configuration's values.
    """
    try:
        made = tiny_config(CONFIG_MAPPING[kind])
    except StrictDataclassError:  # its checks compare sizes with each other: `changes` has all of them
        made = CONFIG_MAPPING[kind]()
    values = made.to_dict()
    values.pop("model_type", None)
    _put_token_ids(values, processor)
    for name, value in changes.items():
        target = values
        *path, last = name.split(".")
        for part in path:
            target = target[part]
        target[last] = copy.deepcopy(value)
    for name, token in ids.items():
        values[name] = processor.tokenizer.convert_tokens_to_ids(token)
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
