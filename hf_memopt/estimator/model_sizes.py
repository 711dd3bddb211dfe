"""Sizes in a config.json that no model has are refused before transformers allocates lists and tensors of them."""

import math
import re
from collections.abc import Mapping
from typing import Any

from hf_memopt.errors import InputError, brief

# Several times the deepest and the widest models there are: Llama 3.1 405B has 126 layers, and research models a
# thousand; vocabularies end at 262,144 (Gemma 3). An estimate of 2,000 layers takes some seconds.
_MAX_LAYERS = 2_000
_MAX_SIZE = 2**24
# Names of the sizes in transformers' configurations that decide the shapes of weights.
_LAYERS = re.compile(r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(en|de)coder_layers|depth)")
_WIDTHS = re.compile(
    r"(hidden_size|d_model|n_embd|embed_dim|vocab_size|intermediate_size|(en|de)coder_ffn_dim|d_ff|d_kv"
    r"|(num_|n_)?(attention_|key_value_|(en|de)coder_attention_)?heads?|n_head|head_dim|patch_size)"
)
# Experts of a layer, and those of them that each token uses.
_EXPERTS = re.compile(r"(num_(local_)?|n_routed_|moe_num_)experts")
_USED_EXPERTS = re.compile(r"(num_experts_per_tok|experts_per_token|top_k_experts|moe_(topk|top_k|k))")
_MAY_BE_ZERO = ("depth", "head_dim")  # configurations in transformers have 0 for "derived"


def check_sizes(content: Mapping[str, Any], where: str) -> None:
    """Check the sizes of a configuration and of those nested in it.

    Args:
        content: of a config.json.
        where: begins an error's message.

    Raises:
        InputError: an impossible size; the message names the key, its value and what it must be.
    """
    for name, value in content.items():
        if isinstance(value, Mapping):
            check_sizes(value, f"{where}: {name}")
        elif value is not None and _LAYERS.fullmatch(str(name)):
            _check_number(name, value, _MAX_LAYERS, where)
        elif value is not None and _WIDTHS.fullmatch(str(name)):
            _check_number(name, value, _MAX_SIZE, where)
    heads, shared = content.get("num_attention_heads"), content.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise InputError(
            f"{where}: num_key_value_heads={shared} does not divide num_attention_heads={heads}: choose one that does"
        )
    number = {name: value for name, value in content.items() if _EXPERTS.fullmatch(str(name)) and value}
    used = {name: value for name, value in content.items() if _USED_EXPERTS.fullmatch(str(name)) and value}
    for name, value in {**number, **used}.items():
        _check_number(name, value, _MAX_SIZE, where)
    experts = max((max(value) if isinstance(value, list) else value for value in number.values()), default=math.inf)
    for name, value in used.items():
        if isinstance(value, int) and value > experts:
            raise InputError(f"{where}: {name}={value} is more than the {experts} experts of a layer: set it to less")


def _check_number(name: str, value: Any, greatest: int, where: str) -> None:
    if isinstance(value, list):  # a size for each layer, or for each side of a patch
        for item in value:
            _check_number(name, item, greatest, where)
        return
    smallest = 0 if name in _MAY_BE_ZERO else 1
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= greatest:
        raise InputError(f"{where}: {name}={brief(value)} must be a whole number from {smallest} to {greatest}")
