"""Which parts of a video model are trained: the tower that sees, the projector between, the language model."""

import copy
import re

import torch

from hf_memopt.errors import InputError
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace
from hf_memopt.remote_code import is_trusted

PARTS = ("vision", "projector")
# What transformers calls the layers between tower and language model, beside the tower or within it.
_PROJECTORS = ("multi_modal_projector", "connector", "projector", "merger", "deepstack_merger_list")


def vision_parts(model) -> tuple[str, list[str]]:
    """The tower's full name, and the projector's modules'.

    Raises:
        InputError: the model sees nothing.
    """
    inner = inner_model(model)
    tower = inner.get_encoder(modality="video")
    names = {id(module): name for name, module in inner.named_modules()}
    if tower is inner or not names.get(id(tower)):
        raise InputError(f"{type(inner).__name__} has no vision tower: use recipes/sft.py for language models")
    projectors = [name for name in names.values() if name.rpartition(".")[2] in _PROJECTORS]
    outermost = [name for name in projectors if not any(name.startswith(f"{other}.") for other in projectors)]
    return names[id(tower)], outermost


def frozen_parts(model) -> tuple[str, ...]:
    """Of PARTS, those without a weight that is trained."""
    tower, projectors = vision_parts(model)
    trained = {"vision": False, "projector": False}
    for name, weight in inner_model(model).named_parameters():
        between = any(name.startswith(f"{part}.") for part in projectors)
        if weight.requires_grad and (between or name.startswith(f"{tower}.")):
            trained["projector" if between else "vision"] = True
    return tuple(part for part in PARTS if not trained[part])


def train_parts(model, peft_config, frozen: tuple[str, ...]):
    """The model with adapters, or trained in full, but for its frozen parts; the language model is always trained.

    Args:
        peft_config: a LoraConfig, or None for full fine-tuning.
        frozen: of PARTS.
    """
    _freeze(model, frozen)
    if peft_config is None:
        return model
    if peft_config.exclude_modules is None:
        peft_config = copy.copy(peft_config)
        peft_config.exclude_modules = _not_adapted(model, frozen)
    return add_adapters(model, peft_config)


def _freeze(model, frozen: tuple[str, ...]) -> None:
    tower, projectors = vision_parts(model)
    for name, weight in model.named_parameters():
        between = any(name.startswith(f"{part}.") for part in projectors)
        seeing = name.startswith(f"{tower}.") and not between
        if (seeing and "vision" in frozen) or (between and "projector" in frozen):
            weight.requires_grad_(False)
    if "vision" in frozen:
        for part in model.get_submodule(tower).modules():
            if hasattr(part, "get_input_embeddings"):
                replace(part, "get_input_embeddings", _none)


def _none() -> None:
    """What a tower that is not trained answers enable_input_require_grads, which would put it into autograd."""


def _not_adapted(model, frozen: tuple[str, ...]) -> str | None:
    """LoraConfig's `exclude_modules` for the parts that stay as they are; None where there are none."""
    tower, projectors = vision_parts(model)
    left = []
    if "vision" in frozen:
        within = [name.removeprefix(f"{tower}.") for name in projectors if name.startswith(f"{tower}.")]
        but = f"(?!{'|'.join(map(re.escape, within))})" if within else ""
        left.append(rf"{re.escape(tower)}\.{but}.*")
    if "projector" in frozen:
        left += [rf"{re.escape(name)}(\..*)?" for name in projectors]
    return "|".join(left) or None


def not_quantized(config, auto) -> list[str]:
    """BitsAndBytesConfig's `llm_int8_skip_modules`, by full names.

    transformers 5 does not find "visual" within "model.visual", and a list of one's own drops the head, which is left
    out by default.
    """
    with torch.device("meta"):
        tower, projectors = vision_parts(auto.from_config(config, trust_remote_code=is_trusted(config)))
    return [tower, *projectors, "lm_head"]


def take_videos_of_any_length(model) -> None:
    """Have models that take videos as one tensor (LLaVA-OneVision) take a list of them, and see them one by one."""
    for part in inner_model(model).modules():
        if hasattr(part, "get_video_features") and hasattr(part, "image_newline"):
            replace(part, "get_video_features", _one_by_one(part.get_video_features))


def _one_by_one(features):
    def of_each(pixel_values_videos, *args, **kwargs):
        if not isinstance(pixel_values_videos, list):
            return features(pixel_values_videos, *args, **kwargs)
        found = [features(video, *args, **kwargs) for video in pixel_values_videos]
        tokens = [video.pooler_output.flatten(0, 1) for video in found]
        found[0].pooler_output = torch.cat(tokens)[None]
        return found[0]

    return of_each
