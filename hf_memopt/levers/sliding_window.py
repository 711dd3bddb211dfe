"""A narrower attention window, for architectures that have one."""

from pathlib import Path

from hf_memopt.errors import InputError

_SLIDING = "sliding_attention"


def set_window(model, tokens: int) -> None:
    """Have every layer that may attend to a window do so with one of `tokens` tokens.

    Where all layers attend to everything, all get the window; where the architecture alternates, the other
    layers stay.
    It saves time with kernels that skip what is outside (flash attention, flex attention); sdpa needs a mask for it.

    Raises:
        InputError: the configuration has no window.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "sliding_window"):
        raise InputError(
            f"sliding_window={tokens}: {config.model_type} has no attention window; architectures that have one: "
            f"{', '.join(_with_window())}"
        )
    config.sliding_window = tokens
    kinds = getattr(config, "layer_types", None)
    everywhere = kinds is not None and _SLIDING not in kinds
    if everywhere:
        config.layer_types = [_SLIDING] * len(kinds)
        if hasattr(config, "use_sliding_window"):
            config.use_sliding_window = True
    for module in model.modules():
        if getattr(module, "has_sliding_layers", None) is False:
            module.has_sliding_layers = True
        for name in ("layer_type", "attention_type"):
            if everywhere and getattr(module, name, None) == "full_attention":
                setattr(module, name, _SLIDING)
        if hasattr(module, "sliding_window") and (everywhere or module.sliding_window is not None):
            module.sliding_window = tokens


def _with_window() -> list[str]:
    """Model types whose configuration has a window, from the installed transformers."""
    import transformers

    folder = Path(transformers.__file__).parent / "models"
    files = folder.glob("*/configuration_*.py")
    return sorted({file.parent.name for file in files if "sliding_window:" in file.read_text(encoding="utf-8")})
