"""The processor of a video model: transformers' own, with or without torchvision."""

import copy
import importlib.util
import json
from pathlib import Path
from unittest import mock

import torch
from transformers.utils import PushToHubMixin, cached_file

from hf_memopt.errors import InputError, as_input_error, choose
from hf_memopt.video.pixels import FAMILIES, pixels_of

_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_FIXED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False}


def load_processor(name: str, config, trust_remote_code: bool = False):
    """A genuine transformers processor, of AutoProcessor where torchvision is there.

    Elsewhere the same class is made around this project's own frames-to-pixels, which need torch alone, and
    transformers' image processors for Pillow.

    Raises:
        InputError: neither is possible for this model.
    """
    with as_input_error(f"processor {name!r}", Exception):  # tokenizers, written in Rust, raises plain Exceptions
        if importlib.util.find_spec("torchvision"):
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
            if not hasattr(processor, "video_processor"):
                raise InputError(f"processor {name!r} takes no videos: use recipes/sft.py for language models")
            return processor
        return _without_torchvision(name, config, trust_remote_code)


def _without_torchvision(name: str, config, trust_remote_code: bool):
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = config.model_type
    if kind not in FAMILIES:
        raise InputError(f"{choose('video model type', kind, FAMILIES)} For others install torchvision")
    whole, settings = _json(name, _FILES[0]), settings_of(name)
    made_of = getattr(transformers, PROCESSOR_MAPPING_NAMES[kind])
    nested = (*made_of.get_attributes(), "processor_class", "auto_map", "chat_template")
    own = {key: value for key, value in (whole or {}).items() if key not in nested}
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            name, backend="pil", trust_remote_code=trust_remote_code
        ),
        "tokenizer": tokenizer,
        "video_processor": FramesToPixels(kind, settings),
        "chat_template": _chat_template(name, tokenizer),
    }
    # Its constructor asks that the video processor be of the class that needs torchvision.
    with mock.patch.object(made_of, "check_argument_for_proper_class", lambda *_: None):
        return made_of(**parts, **own)


def settings_of(name: str) -> dict:
    """What a checkpoint, in a folder or on the hub, says of its video processor; nothing where it cannot be asked."""
    if not Path(name).exists() and "/" not in str(name):
        return {}
    try:
        whole, alone, images = (_json(name, file) for file in _FILES)
    except (OSError, ValueError):
        return {}
    return (whole or {}).get("video_processor") or alone or images or {}


def _chat_template(name: str, tokenizer) -> str | None:
    file = cached_file(name, "chat_template.jinja", _raise_exceptions_for_missing_entries=False)
    if file:
        return Path(file).read_text(encoding="utf-8")
    return (_json(name, "chat_template.json") or {}).get("chat_template") or tokenizer.chat_template


def _json(name: str, file: str) -> dict | None:
    """A JSON file of a checkpoint, in a folder or on the hub; None where it has none."""
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(found).read_text(encoding="utf-8")) if found else None


class FramesToPixels(PushToHubMixin):
    """A video processor of transformers' shape, for clips whose frames are chosen already.

    Raises:
        InputError: the checkpoint prepares frames in a way that this class does not know.
    """

    model_input_names = ("pixel_values_videos",)
    valid_kwargs = None
    _auto_class = None

    def __init__(self, kind: str, settings: dict):
        self.family = FAMILIES[kind]
        settings = {**self.family.defaults, **{key: value for key, value in settings.items() if value is not None}}
        for key, usual in _FIXED.items():
            if settings.get(key, usual) != usual:
                raise InputError(f"the video processor says {key}={settings[key]}: install torchvision for it")
        if "video_sampling" in settings:
            settings["size"] = settings["video_sampling"]["video_size"]
        self.settings = settings
        self.merge_size = settings.get("merge_size", 1)
        self.temporal_patch_size = settings.get("temporal_patch_size", 1)
        self.num_frames = self.fps = None

    def __call__(self, videos, video_metadata, **_):
        """Tensors of one clip, and what transformers' processors call its metadata."""
        from transformers.video_utils import VideoMetadata

        (frames,), (about,) = videos, video_metadata
        frames = torch.as_tensor(frames)
        return {**pixels_of(self.family, self.settings, frames), "video_metadata": [VideoMetadata(**about)]}

    def to_dict(self) -> dict:
        """What a checkpoint says of its video processor."""
        return {**copy.deepcopy(self.settings), "video_processor_type": self.family.name}
