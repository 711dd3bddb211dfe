"""The model types that the video recipe trains, and what their processors must return."""

import inspect

from transformers.utils import is_timm_available

from hf_memopt.errors import InputError

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
