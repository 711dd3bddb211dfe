"""A video model's processor: transformers' own with torchvision, else the same class around pixels.py."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers.utils import PushToHubMixin, cached_file, is_torchvision_available

from hf_memopt.errors import InputError, as_input_error, choose
from hf_memopt.packages import how_to_install
from hf_memopt.video.families import fit_to_model, model_class
from hf_memopt.video.pixels import FAMILIES, prepare_frames
from hf_memopt.video.published import published_settings

_INSTALL = f"install torchvision: {how_to_install('torchvision')}"
_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
_REQUIRED = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_center_crop": False}


def load_processor(name: str, config, trust_remote_code: bool = False):
    """AutoProcessor's processor. Without torchvision, the same class around TorchVideoProcessor.

    Raises:
        InputError: the recipe cannot train the model, or the checkpoint has no processor for videos, or only one that
            needs torchvision.
    """
    model_class(config)
    processor = _load(name, config, trust_remote_code)
    fit_to_model(processor, config)
    return processor


def _load(name: str, config, trust_remote_code: bool):
    with as_input_error(f"processor {name!r}", Exception):  # tokenizers, written in Rust, raises plain Exceptions
        if not is_torchvision_available():
            return _load_without_torchvision(name, config, trust_remote_code)
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        if not hasattr(processor, "video_processor"):
            raise InputError(f"processor {name!r} takes no videos: use recipes/sft.py for language models")
        return processor


def _load_without_torchvision(name: str, config, trust_remote_code: bool):
    import transformers
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    model_type = config.model_type
    if model_type not in FAMILIES:
        raise InputError(f"{choose('video model type', model_type, FAMILIES)} For others {_INSTALL}")
    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    nested = (*processor_class.get_attributes(), "processor_class", "auto_map", "chat_template")
    fields = {key: value for key, value in (_read_json(name, _FILES[0]) or {}).items() if key not in nested}
    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(
            name, backend="pil", trust_remote_code=trust_remote_code
        ),
        "tokenizer": tokenizer,
        "video_processor": TorchVideoProcessor(model_type, read_video_settings(name)),
        "chat_template": _chat_template(name, tokenizer),
    }
    # transformers 5.23: ProcessorMixin.__init__ insists that a video processor derives from BaseVideoProcessor, whose
    # module imports torchvision. Needed as long as that base class does.
    with mock.patch.object(processor_class, "check_argument_for_proper_class", lambda *_: None):
        return processor_class(**parts, **fields)


def read_video_settings(name: str) -> dict[str, Any]:
    """A checkpoint's video processor settings, from a folder or the hub.

    Returns:
        What is bundled of a published checkpoint where the hub is unreachable, and for a bundled architecture's name;
        empty where nothing is known.
    """
    processor = video = image = None
    if Path(name).exists() or "/" in str(name):
        with contextlib.suppress(OSError, ValueError):
            processor, video, image = (_read_json(name, file) for file in _FILES)
    return (processor or {}).get("video_processor") or video or image or published_settings(name)


def lower_shortest_edge(processor, max_pixels: int | None) -> None:
    """Lower the size to which a processor scales small frames and images up, which may exceed `max_pixels`."""
    if not max_pixels:
        return
    for part in filter(None, (processor.video_processor, getattr(processor, "image_processor", None))):
        settings = settings_dict(part)
        size = dict(settings.get("size") or {})
        if settings.get("patch_size") and size.get("shortest_edge") and size.get("longest_edge"):
            # A quarter: processors round sides up from there.
            size["shortest_edge"] = min(size["shortest_edge"], max_pixels // 4)
            settings["size"] = size


def settings_dict(part) -> dict[str, Any]:
    """The settings of an image or video processor, to read and change: transformers' processors keep attributes."""
    return part.settings if isinstance(part, TorchVideoProcessor) else vars(part)


def _with_pixel_bounds(settings: dict[str, Any]) -> dict[str, int]:
    """`size` with the older `min_pixels` and `max_pixels` in it, as transformers' video processors put them there."""
    bounds = {"shortest_edge": settings.pop("min_pixels", None), "longest_edge": settings.pop("max_pixels", None)}
    return {**settings["size"], **{edge: pixels for edge, pixels in bounds.items() if pixels is not None}}


def _chat_template(name: str, tokenizer) -> str | None:
    file = cached_file(name, "chat_template.jinja", _raise_exceptions_for_missing_entries=False)
    if file:
        return Path(file).read_text(encoding="utf-8")
    return (_read_json(name, "chat_template.json") or {}).get("chat_template") or tokenizer.chat_template


def _read_json(name: str, filename: str) -> dict | None:
    """A JSON file of a checkpoint, in a folder or on the hub; None where it has none."""
    path = cached_file(name, filename, _raise_exceptions_for_missing_entries=False)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else None


class TorchVideoProcessor(PushToHubMixin):
    """Stands in for transformers' video processor, with torch alone; frames are sampled before.

    Args:
        model_type: a key of FAMILIES.
        settings: the checkpoint's video processor configuration.

    Raises:
        InputError: the checkpoint prepares frames in a way that pixels.py does not implement.
    """

    model_input_names = ("pixel_values_videos",)
    valid_kwargs = None
    _auto_class = None

    def __init__(self, model_type: str, settings: dict[str, Any]) -> None:
        self.family = FAMILIES[model_type]
        own = {key: value for key, value in settings.items() if value is not None}
        settings = {**self.family.defaults, **own}
        for key, required in _REQUIRED.items():
            if settings.get(key, required) != required:
                raise InputError(f"the video processor says {key}={settings[key]}: {_INSTALL}")
        if "video_sampling" in own and "size" not in own:
            # SmolVLM. transformers 5.23 (video_processing_smolvlm.py) prefers `size`, which is the images', too.
            settings["size"] = own["video_sampling"]["video_size"]
        settings["size"] = _with_pixel_bounds(settings)
        self.settings = settings
        self.merge_size = settings.get("merge_size", 1)
        self.temporal_patch_size = settings.get("temporal_patch_size", 1)
        self.num_frames = self.fps = None

    def __call__(self, videos, video_metadata, **_) -> dict[str, Any]:
        """The model's tensors for one clip, and its metadata as transformers' processors return it."""
        from transformers.video_utils import VideoMetadata

        (frames,), (metadata,) = videos, video_metadata
        tensors = prepare_frames(self.family, self.settings, torch.as_tensor(frames))
        return {**tensors, "video_metadata": [VideoMetadata(**metadata)]}

    def to_dict(self) -> dict[str, Any]:
        """The video processor configuration that a checkpoint saves."""
        return {**copy.deepcopy(self.settings), "video_processor_type": self.family.processor}
