"""The parts of a video model that are trained: vision tower, projector, language model."""

import copy
import functools
import inspect
import re
from collections.abc import Iterator

import torch

from hf_memopt.errors import InputError
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace
from hf_memopt.remote_code import is_trusted

PARTS = ("vision", "projector")
# transformers' names for the layers between tower and language model, beside the tower or inside it.
_PROJECTORS = ("multi_modal_projector", "connector", "projector", "merger", "deepstack_merger_list")
_PROJECTORS += ("embed_vision", "mm_projector", "vision_projection", "aligner")  # Gemma, Kimi, LightOnOCR, DeepSeek-VL


def vision_parts(model) -> tuple[str, list[str]]:
    """Full names of the vision tower and of the projector's modules; no tower is an empty name (Gemma 4 Unified).

    Raises:
        InputError: the model has neither.
    """
    inner = inner_model(model)
    tower = inner.get_encoder(modality="video")
    names = {id(module): name for name, module in inner.named_modules()}
    tower = "" if tower is inner else names.get(id(tower), "")
    projectors = [name for name in names.values() if name.rpartition(".")[2] in _PROJECTORS]
    outermost = [name for name in projectors if not any(name.startswith(f"{other}.") for other in projectors)]
    if not tower and not outermost:
        raise InputError(f"{type(inner).__name__} has no vision tower: use recipes/sft.py for language models")
    return tower, outermost


def frozen_parts(model) -> tuple[str, ...]:
    """The PARTS without a trained weight."""
    weights = _part_weights(inner_model(model), *vision_parts(model))
    trained = {part for part, weight in weights if weight.requires_grad}
    return tuple(part for part in PARTS if part not in trained)


def _part_weights(inner, tower: str, projectors: list[str]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights of vision tower and projector, each with its part; the arguments as vision_parts() names them."""
    for name, weight in inner.named_parameters():
        if any(name.startswith(f"{part}.") for part in projectors):
            yield "projector", weight
        elif name.startswith(f"{tower}."):
            yield "vision", weight


def train_parts(model, peft_config, frozen: tuple[str, ...]):
    """Freeze parts of a model and add adapters to the others; the language model is always trained.

    Args:
        peft_config: a LoraConfig, or None for full fine-tuning.
        frozen: of PARTS.
    """
    tower, projectors = vision_parts(model)
    for part, weight in _part_weights(model, tower, projectors):
        if part in frozen:
            weight.requires_grad_(False)
    if "vision" in frozen and tower:
        for module in model.get_submodule(tower).modules():
            if hasattr(module, "get_input_embeddings"):
                replace(module, "get_input_embeddings", _no_embeddings)
    if peft_config is None:
        return model
    if peft_config.exclude_modules is None:
        peft_config = copy.copy(peft_config)
        # LoraConfig's `exclude_modules` for the frozen parts; None where nothing is frozen.
        patterns = []
        if "vision" in frozen and tower:
            inside = [name.removeprefix(f"{tower}.") for name in projectors if name.startswith(f"{tower}.")]
            except_projector = f"(?!{'|'.join(map(re.escape, inside))})" if inside else ""
            patterns.append(rf"{re.escape(tower)}\.{except_projector}.*")
        if "projector" in frozen:
            patterns += [rf"{re.escape(name)}(\..*)?" for name in projectors]
        peft_config.exclude_modules = "|".join(patterns) or None
    return add_adapters(model, peft_config)


def _no_embeddings() -> None:
    """get_input_embeddings() of a frozen tower: enable_input_require_grads() would hook the real ones, and the tower
    would store activations for a backward pass without effect."""


def not_quantized(config, auto) -> list[str]:
    """BitsAndBytesConfig's `llm_int8_skip_modules`, by full names.

    transformers 5.23 matches names from the start, so "visual" would miss "model.visual"; and a list replaces the
    default one, which names the head.
    """
    with torch.device("meta"):
        tower, projectors = vision_parts(auto.from_config(config, trust_remote_code=is_trusted(config)))
    return [*filter(None, [tower]), *projectors, "lm_head"]


def take_videos_of_any_length(model) -> None:
    """Have models that take media as one tensor (LLaVA, PerceptionLM) accept a list, encoded one by one."""
    for part in inner_model(model).modules():
        for name in ("get_video_features", "get_image_features"):
            if hasattr(part, name):
                replace(part, name, _one_by_one(getattr(part, name)))


def _one_by_one(features):
    pixels, *_ = inspect.signature(features).parameters

    @functools.wraps(features)
    def features_of_any(*args, **kwargs):
        media = args[0] if args else kwargs.get(pixels)
        if not isinstance(media, list):
            return features(*args, **kwargs)
        kwargs.pop(pixels, None)
        outputs = [features(medium, *args[1:], **kwargs) for medium in media]
        tokens = [output.pooler_output.flatten(0, 1) for output in outputs]
        outputs[0].pooler_output = torch.cat(tokens)[None]
        return outputs[0]

    return features_of_any
