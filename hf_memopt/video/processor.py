"""A video model's processor: transformers' own with torchvision, else the same class around pixels.py."""

import contextlib
import copy
import inspect
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers.utils import PushToHubMixin, cached_file, is_timm_available, is_torchvision_available

from hf_memopt import files
from hf_memopt.errors import InputError, as_input_error, choose
from hf_memopt.packages import how_to_install
from hf_memopt.video.pixels import FAMILIES, prepare_frames

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
    with as_input_error(f"processor {name!r}", Exception):  # tokenizers, written in Rust, raises plain Exceptions
        if is_torchvision_available():
            from transformers import AutoProcessor

            processor = AutoProcessor.from_pretrained(name, trust_remote_code=trust_remote_code)
        else:
            processor = _load_without_torchvision(name, config, trust_remote_code)
        if not hasattr(processor, "video_processor"):
            raise InputError(f"processor {name!r} takes no videos: use recipes/sft.py for language models")
    fit_to_model(processor, config)
    return processor


def _load_without_torchvision(name: str, config, trust_remote_code: bool):
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    model_type = config.model_type
    if model_type not in FAMILIES:
        raise InputError(f"{choose('video model type', model_type, FAMILIES)} For others {_INSTALL}")
    processor_class = getattr(transformers, PROCESSOR_MAPPING_NAMES[model_type])
    nested = (*processor_class.get_attributes(), "processor_class", "auto_map", "chat_template")
    fields = {key: value for key, value in (read_json(name, _FILES[0]) or {}).items() if key not in nested}
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    parts = {
        "image_processor": transformers.AutoImageProcessor.from_pretrained(
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
            processor, video, image = (read_json(name, file) for file in _FILES)
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


def _chat_template(name: str, tokenizer) -> str | None:
    file = cached_file(name, "chat_template.jinja", _raise_exceptions_for_missing_entries=False)
    if file:
        return Path(file).read_text(encoding="utf-8")
    return (read_json(name, "chat_template.json") or {}).get("chat_template") or tokenizer.chat_template


def read_json(name: str, filename: str) -> dict | None:
    """A JSON file of a checkpoint, in a folder or on the hub; None where it has none.

    Raises:
        InputError: it does not hold a JSON object.
    """
    path = cached_file(name, filename, _raise_exceptions_for_missing_entries=False)
    return files.read_json(path) if path else None


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
        bounds = {"shortest_edge": settings.pop("min_pixels", None), "longest_edge": settings.pop("max_pixels", None)}
        settings["size"] = {
            **settings["size"],
            **{edge: pixels for edge, pixels in bounds.items() if pixels is not None},
        }
        self.settings = settings
        self.merge_size = settings.get("merge_size", 1)
        self.temporal_patch_size = settings.get("temporal_patch_size", 1)
        self.num_frames = self.fps = None

    def __call__(self, videos, video_metadata, **_) -> dict[str, Any]:
        """The model's tensors for one clip, and its metadata as transformers' processors return it."""
        from transformers.video_utils import VideoMetadata

        (frames,), (metadata,) = videos, video_metadata
        return {**self.prepare(frames), "video_metadata": [VideoMetadata(**metadata)]}

    def prepare(self, frames) -> dict[str, torch.Tensor]:
        """The model's tensors for the frames of one clip, (frames, 3, height, width)."""
        return prepare_frames(self.family, self.settings, torch.as_tensor(frames))

    def to_dict(self) -> dict[str, Any]:
        """The video processor configuration that a checkpoint saves."""
        return {**copy.deepcopy(self.settings), "video_processor_type": self.family.processor}


# Types with a reason that their classes do not show.
_REFUSED = {
    # modeling_kimi_k25.py, get_image_features(): sizes from grid_thw, whose frames the tower has merged.
    "kimi_k25": "transformers 5.23 cannot split the features of a clip of several frames",
    # Losses of a batch were 3e-4 off those of its samples one by one (benchmarks/video_families.py).
    "minicpmv4_6": "a clip's loss depends on the other clips of its batch",
    "minicpmv4_7": "a clip's loss depends on the other clips of its batch",
    "molmo2": "its pooling indices count the patches of a batch, and are not joined here",
    # processing_minimax_m3_vl.py, videos_kwargs: do_resize=False.
    "minimax_m3_vl": "its processor does not resize frames to whole patches",
    # processing_nemotron_h_omni.py, __call__(): returns no text_replacement_offsets, takes no list of metadata.
    "nemotron_h_omni": "its processor does not say where a clip is in a text",
}

# Their videos consist of image tokens: modeling_glm4v.py, get_placeholder_mask(), takes those of either kind.
_ONLY_VIDEOS = ("Glm4vProcessor", "Glm46VProcessor")


def check_media(processor, kinds: set[str], where: str) -> None:
    """Refuse images where a model mistakes the tokens of videos for them.

    Args:
        kinds: "video" and "image", of a row's media.

    Raises:
        InputError: names the row.
    """
    name = type(processor).__name__
    if "image" in kinds and name in _ONLY_VIDEOS:
        raise InputError(
            f"{where}: has images, and models of {name} mistake the tokens of videos for those of images: leave rows "
            "with images out"
        )


def fit_to_model(processor, config) -> None:
    """Have a processor return what the model needs.

    Raises:
        InputError: the recipe cannot train the model, or the processor has no place for videos and images in a text.
    """
    kind = model_class(config)
    for medium in ("video", "image"):
        if not isinstance(getattr(processor, f"{medium}_token", None), str):
            name = type(processor).__name__
            raise InputError(f"{config.model_type}: {name} has no token for a {medium}'s place in a text")
    if kind is not None and "mm_token_type_ids" in inspect.signature(kind.forward).parameters:
        processor.return_mm_token_type_ids = True
    if config.model_type == "molmo2":  # its processor puts this before every text
        begin = processor.tokenizer.bos_token or processor.tokenizer.eos_token
        processor.chat_template = begin + processor.chat_template.removeprefix(begin)


def model_class(config) -> type | None:
    """The class of AutoModelForImageTextToText for a configuration; None for a checkpoint's own code.

    Raises:
        InputError: the recipe cannot train the model.
    """
    from transformers import AutoModelForImageTextToText

    model_type = config.model_type
    if model_type in _REFUSED:
        raise InputError(f"{model_type}: {_REFUSED[model_type]}")
    kind = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    if kind is None:
        if "AutoModelForImageTextToText" in (getattr(config, "auto_map", None) or {}):
            return None
        raise InputError(f"{model_type}: AutoModelForImageTextToText has no such type: use recipes/sft.py for texts")
    if "labels" not in inspect.signature(kind.forward).parameters:
        raise InputError(f"{model_type}: {kind.__name__} computes no loss from labels")
    tower = getattr(config, "vision_config", None)
    if getattr(tower, "model_type", None) == "timm_wrapper" and not is_timm_available():
        raise InputError(f"{model_type}: its vision tower needs timm: pip install timm")
    return kind


# Settings of published checkpoints, for estimates that read no files of the checkpoint. A file has the name of a
# bundled architecture, and says what the file at its `source` says of videos: video_preprocessor_config.json of the
# checkpoint, or preprocessor_config.json where it has no other. The class defaults of transformers are no substitute:
# Qwen2.5-VL's allow a frame of 0.6 megapixels, its checkpoints one of 12.8.
_FOLDER = Path(__file__).parent / "preprocessors"


def published_settings(model: str) -> dict[str, Any]:
    """Settings of a bundled architecture's name or of the hub id in its `source`; empty for others."""
    name = str(model)
    if "/" not in name:
        path = _FOLDER / f"{name.lower()}.json"
        return files.read_json(path) if path.is_file() else {}
    source = f"https://huggingface.co/{name}/"
    contents = (files.read_json(path) for path in sorted(_FOLDER.glob("*.json")))
    return next((content for content in contents if content["source"].startswith(source)), {})
