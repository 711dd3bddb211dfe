"""A narrower attention window: the architecture's own, or one that is put over its causal mask."""

import functools
import inspect

from hf_memopt.errors import InputError
from hf_memopt.levers.attention_pattern import attend_by_pattern, causal_attention, text_configs
from hf_memopt.levers.language_model import inner_model
from hf_memopt.levers.replaced import replace

_SLIDING = "sliding_attention"


def set_window(model, tokens: int) -> None:
    """Have every layer that may attend to a window do so with one of `tokens` tokens.

    Where all layers attend to everything, all get the window; where the architecture alternates, the other
    layers stay. Architectures without a window (Llama) get it from their mask, or from flash attention's own argument.
    It saves time with kernels that skip what is outside (flash attention, flex attention); sdpa needs a mask for it.

    Raises:
        InputError: the architecture has no window and does not attend through transformers' attention interface.
    """
    config = model.config.get_text_config()
    if has_window(type(config)):
        _narrow(model, config, tokens)
    elif "flash_attention" in (config._attn_implementation or ""):
        _give_window(model, tokens)
    else:
        attend_by_pattern(model, f"sliding_window={tokens}", {"sliding_window": tokens})


def has_window(kind: type) -> bool:
    """Whether an architecture knows windows. Its class is asked: a configuration may have been given one that no layer
    reads."""
    return hasattr(kind, "sliding_window") or "sliding_window" in inspect.signature(kind.__init__).parameters


def _narrow(model, config, tokens: int) -> None:
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


def _give_window(model, tokens: int) -> None:
    """Flash attention builds no mask and takes the window as an argument, which attention modules pass on."""
    inner = inner_model(model)
    setting = f"sliding_window={tokens}"
    for module in causal_attention(inner, setting):
        parameters = inspect.signature(type(module).forward).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            raise InputError(
                f"{setting}: {type(module).__name__} passes flash attention nothing: use attn_implementation=sdpa"
            )
        replace(module, "forward", _with_window(module.forward, tokens))
    for config in text_configs(inner):
        config.sliding_window = tokens


def _with_window(forward, tokens: int):
    @functools.wraps(forward)
    def attend(*args, **kwargs):
        return forward(*args, **{**kwargs, "sliding_window": tokens})

    return attend
