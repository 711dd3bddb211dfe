"""Sliding-window attention: the architecture's own window, or one combined with its causal mask."""

import functools
import inspect

from hf_memopt.errors import InputError
from hf_memopt.levers.attention_pattern import attend_by_pattern, causal_attention, text_configs
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace

_SLIDING = "sliding_attention"


def set_window(model, tokens: int) -> None:
    """Set a model's attention window to `tokens` tokens.

    If all layers use full attention, all get the window; if the architecture alternates, full-attention layers stay.
    Architectures without a window (Llama) get it through their mask, or through flash attention's argument. Kernels
    that skip masked tokens (flash and flex attention) get faster; sdpa needs a mask.

    Raises:
        InputError: the architecture has no window and does not use transformers' attention interface.
    """
    config = model.config.get_text_config()
    if has_window(type(config)):
        _set_own_window(model, config, tokens)
    elif "flash_attention" in (config._attn_implementation or ""):
        _pass_window(model, tokens)
    else:
        attend_by_pattern(model, f"sliding_window={tokens}", {"sliding_window": tokens})


def has_window(kind: type) -> bool:
    """True if a configuration class has a sliding window; an instance may have an attribute that no layer reads."""
    return hasattr(kind, "sliding_window") or "sliding_window" in inspect.signature(kind.__init__).parameters


def _set_own_window(model, config, tokens: int) -> None:
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


def _pass_window(model, tokens: int) -> None:
    """Pass the window as flash attention's own argument, through the attention modules' **kwargs."""
    inner = inner_model(model)
    setting = f"sliding_window={tokens}"
    for module in causal_attention(inner, setting):
        parameters = inspect.signature(type(module).forward).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise InputError(
                f"{setting}: {type(module).__name__} does not pass arguments to flash attention: "
                "use attn_implementation=sdpa"
            )
        replace(module, "forward", _with_window(module.forward, tokens))
    for config in text_configs(inner):
        config.sliding_window = tokens


def _with_window(forward, tokens: int):
    @functools.wraps(forward)
    def attend(*args, **kwargs):
        return forward(*args, **{**kwargs, "sliding_window": tokens})

    return attend
