"""The batch of a job of images for estimates: what transformers' image processor makes of pictures of one size."""

import contextlib
import json
import math
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from hf_memopt.errors import InputError, as_input_error
from hf_memopt.video.frame_limits import capped_size, parse_frame_size
from hf_memopt.video.inputs import ClipShape, VideoInputs, at_least_one, seen_pixels
from hf_memopt.video.processor import published_settings, read_json

_IMAGE_TYPE = 1  # of mm_token_type_ids: transformers' ProcessorMixin.create_mm_token_type_ids


@dataclass(frozen=True)
class ImageInputs(VideoInputs):
    """Pictures of one size in each sample, with a question and an answer.

    Attributes:
        frames: pictures of a sample.
        height, width: of a picture in the file, pixels.
        max_pixels_per_frame: height × width of a picture after scaling.
        settings: the checkpoint's image processor settings; empty where they are not known.
    """

    frames: int = 1
    kind: ClassVar[str] = "image"

    def clip(self, config) -> ClipShape:
        kind, settings = _image_processor(config, self.settings)
        patch = settings.get("patch_size", 1)
        multiple = patch["height"] if isinstance(patch, dict) else patch * settings.get("merge_size", 1)
        size = capped_size(self.height, self.width, self.max_pixels_per_frame, multiple)
        with as_input_error(f"images of {config.model_type}", ImportError, ValueError, TypeError):
            tensors = _picture(kind, json.dumps(settings), *size)
        join = torch.cat if config.model_type != "smolvlm" else partial(torch.cat, dim=1)
        joined = {name: join([value] * self.frames) for name, value in tensors.items()}
        beside = 2  # its start and its end
        if config.model_type == "mistral3":  # a break behind each row
            beside = int(tensors["image_sizes"][0, 0]) // patch["height"]
        return ClipShape(joined, self.frames, _tokens(config, settings, tensors), 0, beside)

    def place(self, config) -> tuple[int, int]:
        token = getattr(config, "image_token_id", None)
        return (config.image_token_index if token is None else token), _IMAGE_TYPE

    def halved(self) -> None:
        """Fewer pictures would be other samples."""

    def summary(self, config) -> str:
        tensors, images, tokens, *_ = self.clip(config)
        several = f"{images} images" if images > 1 else "an image"
        pixels = seen_pixels(tensors)
        return f"{several} of {self.width} × {self.height} → {pixels} → {images * tokens:,} tokens"


def image_inputs(model, config, settings: dict[str, Any], seq_len: int | None) -> ImageInputs | None:
    """ImageInputs from `--set`'s `images`, `image_size`, `max_pixels_per_frame` and `answer_tokens`.

    Args:
        model: a folder or hub id whose processor settings are read, or a bundled architecture's name.
        seq_len: tokens of a sample with its pictures, the rest of which are text; None for a short question and
            answer.

    Returns:
        None where neither `images` nor `image_size` is set.

    Raises:
        InputError: an invalid value, or a model that takes no images.
    """
    if not settings.keys() & {"images", "image_size"}:
        return None
    if videos := settings.keys() & {"max_frames", "frame_size"}:
        raise InputError(
            f"{min(videos)} beside images: an estimate is of one of the two, ask about the larger samples"
        )
    counts = {"images": settings.get("images", 1), "answer_tokens": settings.get("answer_tokens", 64)}
    at_least_one(counts)
    width, height = parse_frame_size(settings.get("image_size", "1280x720"), "image_size")
    if counts["images"] > _MOST or width * height > _MOST_PIXELS:
        raise InputError(f"images: at most {_MOST:,} a sample, of at most {_MOST_PIXELS:,} pixels each")
    found = ImageInputs(
        frames=counts["images"],
        height=height,
        width=width,
        max_pixels_per_frame=settings.get("max_pixels_per_frame"),
        answer_tokens=counts["answer_tokens"],
        settings=read_image_settings(str(model)),
    )
    tokens = found.seq_len(config)  # refuses models that take no images
    if seq_len is None:
        return found
    if (text := seq_len - (tokens - found.prompt_tokens - found.answer_tokens)) < 2:
        raise InputError(
            f"seq_len={seq_len} leaves no room for text beside the images' {seq_len - text} tokens: set a longer one, "
            "smaller images, or max_pixels_per_frame"
        )
    asked = min(found.prompt_tokens, text // 2)
    answer = counts["answer_tokens"] if "answer_tokens" in settings else text - asked
    answer = min(answer, text - 1)
    return ImageInputs(**vars(found) | {"prompt_tokens": text - answer, "answer_tokens": answer})


def read_image_settings(name: str) -> dict[str, Any]:
    """A checkpoint's image processor settings, from a folder, or what is bundled of a published one."""
    if Path(name).is_dir():
        whole = own = None
        with contextlib.suppress(OSError, ValueError):
            whole, own = (read_json(name, file) for file in ("processor_config.json", "preprocessor_config.json"))
        return (whole or {}).get("image_processor") or own or {}
    published = published_settings(name)
    of_videos = not published.get("source", "").endswith("/preprocessor_config.json")
    return {"size": _PUBLISHED_SIZE} if published and of_videos else published


@lru_cache(64)
def _picture(kind: str, settings: str, height: int, width: int) -> dict[str, torch.Tensor]:
    """What an image processor of transformers makes of one picture; its pixels are on the meta device."""
    import transformers
    from PIL import Image

    processor = getattr(transformers, kind)(**json.loads(settings))
    made = processor(images=[Image.new("RGB", (width, height))], return_tensors="pt")
    made = {name: torch.as_tensor(made[name]) for name in _INPUTS if name in made}
    return {name: value.to("meta") if name == "pixel_values" else value for name, value in made.items()}


def _image_processor(config, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """transformers' image processor of a model type, one that needs no torchvision, and its settings.

    What a model's own shapes decide is the configuration's: the patches of its tower, or the side of its pictures.

    Raises:
        InputError: a type without one.
    """
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    kinds = [IMAGE_PROCESSOR_MAPPING_NAMES.get(name) for name in (config.model_type, config.model_type[:-4])]  # _moe
    found = next(filter(None, kinds), None)
    kind = (found.get("pil") if isinstance(found, dict) else found and found[0]) or ""
    vision = getattr(config, "vision_config", None)
    if not hasattr(transformers, kind) or vision is None:
        raise _unknown(config)
    taken = {key: settings[key] for key in _SETTINGS & settings.keys()}
    if config.model_type == "internvl":  # whose processor says so, whatever its image processor's settings say
        taken["crop_to_patches"] = True
    if hasattr(vision, "spatial_merge_size"):
        if not taken.keys() & {"size", "min_pixels", "max_pixels"}:
            taken["size"] = _PUBLISHED_SIZE
        patches = {"patch_size": vision.patch_size, "merge_size": vision.spatial_merge_size}
        return kind, {**taken, **patches, "temporal_patch_size": getattr(vision, "temporal_patch_size", 1)}
    side = getattr(vision, "image_size", None)
    if hasattr(config, "mm_tokens_per_image"):
        taken["size"] = {"height": side, "width": side}
    elif config.model_type in _CROPPED:
        taken = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}, **taken}
        if hasattr(config, "image_grid_pinpoints"):
            taken["image_grid_pinpoints"] = config.image_grid_pinpoints
    elif config.model_type == "mistral3":
        merged = vision.patch_size * config.spatial_merge_size
        taken = {"size": {"longest_edge": side}, **taken, "patch_size": {"height": merged, "width": merged}}
    return kind, taken


# Of all of Qwen's checkpoints since Qwen3-VL (preprocessor_config.json), where a job's own are not known.
_PUBLISHED_SIZE = {"shortest_edge": 65536, "longest_edge": 16777216}
_MOST, _MOST_PIXELS = 10_000, 2**27  # a picture is made to be asked about; Pillow warns of more pixels than these
_INPUTS = ("pixel_values", "pixel_attention_mask", "image_grid_thw", "image_sizes")  # that the models take
_CROPPED = ("llava", "vipllava", "llava_next")  # whose tower takes pictures of one side
_SETTINGS = {"size", "max_image_size", "min_pixels", "max_pixels", "do_image_splitting", "crop_to_patches"}
_SETTINGS |= {"min_patches", "max_patches", "max_num_tiles", "crop_size"}


def _tokens(config, settings: dict[str, Any], tensors: dict[str, Any]) -> int:
    """The model's tokens of a picture.

    Raises:
        InputError: a type whose rule is not known.
    """
    if "image_grid_thw" in tensors:
        return math.prod(tensors["image_grid_thw"][0].tolist()) // settings["merge_size"] ** 2
    if hasattr(config, "image_grid_pinpoints"):
        return _tiled_tokens(config, settings, tensors)
    if config.model_type == "mistral3":
        return math.prod(side // settings["patch_size"]["height"] for side in tensors["image_sizes"][0].tolist())
    tiles = math.prod(tensors["pixel_values"].shape[:-3])
    if tokens := getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None):
        return tiles * tokens
    if scale := getattr(config, "scale_factor", None):  # Idefics3, SmolVLM
        return tiles * (config.vision_config.image_size // config.vision_config.patch_size) ** 2 // scale**2
    raise _unknown(config)


def _tiled_tokens(config, settings: dict[str, Any], tensors: dict[str, Any]) -> int:
    """LLaVA-NeXT's: those of the whole picture, and of its tiles without what pads them, as its processor counts."""
    from transformers import LlavaNextProcessor

    if config.model_type not in _CROPPED:
        raise _unknown(config)
    processor = LlavaNextProcessor.__new__(LlavaNextProcessor)  # without a tokenizer, which it does not ask
    processor.image_processor = SimpleNamespace(**settings)
    processor.patch_size = config.vision_config.patch_size
    processor.num_additional_image_tokens = 1  # CLIP's for the whole picture
    side = settings["crop_size"]["height"]
    features = processor._get_number_of_features(*tensors["image_sizes"][0].tolist(), side, side)
    return features - (config.vision_feature_select_strategy == "default")


def _unknown(config) -> InputError:
    return InputError(
        f"images: what a picture is to models of type {config.model_type!r} is not known here; `hf-memopt dry-run` "
        "predicts your own script"
    )
