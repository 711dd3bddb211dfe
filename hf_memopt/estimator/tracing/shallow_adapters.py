"""Adapters of a model that is traced with fewer layers than it has."""

import copy
import re

from hf_memopt.errors import InputError, brief

_REFUSED = {
    "CPT": "its loss selects tokens by a mask whose values only a real batch has",
    "XLORA": "it loads adapters that are trained already, which an estimate does not read",
    "MULTITASK_PROMPT_TUNING": "its batches need task_ids, which estimate() does not make",
    "WAVEFT": "it selects the coefficients of its wavelets by a mask, and fake tensors have no values",
    "POLY": "its batches need task_ids, which estimate() does not make",
    "SHADOW": "in peft 0.21 its carrier object reaches transformers' attention, where training fails too",
}
_NUMBER = re.compile(r"(?:^|[.\\])\d+(?:$|[.\\])|\[\d")  # a layer's number in a module's name or pattern


def check_adapter(peft_config) -> None:
    """
    Raises:
        InputError: no configuration of peft, or an adapter that cannot be traced, with the reason.
    """
    if peft_config is not None and not hasattr(peft_config, "peft_type"):
        raise InputError(
            f"peft_config={brief(peft_config)} must be one of peft's configurations, such as LoraConfig()"
        )
    if reason := _REFUSED.get(getattr(peft_config, "peft_type", None)):
        raise InputError(f"peft_type={peft_config.peft_type.value} cannot be estimated: {reason}")


def adapts_layers_alike(peft_config, layers: int) -> bool:
    """True if every layer of the model gets the same adapter; otherwise the model is traced with all its layers."""
    if peft_config is None:
        return True
    unlike = any(getattr(peft_config, name, None) for name in ("layers_to_transform", "layer_replication", "stride_A"))
    if unlike or (getattr(peft_config, "adapter_layers", None) or layers) != layers:  # Llama-Adapter: the last few
        return False
    patterns = [getattr(peft_config, name, None) for name in ("target_modules", "rank_pattern", "modules_to_save")]
    names = [name for value in patterns for name in ([value] if isinstance(value, str) else value or ())]
    return not any(_NUMBER.search(name) for name in names)


def adapter_at_depth(peft_config, layers: int, depth: int):
    """A configuration that counts the model's layers, for a model that has `depth` of its `layers`."""
    if peft_config is None or layers == depth:
        return peft_config
    shallow = copy.deepcopy(peft_config)
    for name in ("adapter_layers", "num_layers"):
        if getattr(shallow, name, None) == layers:
            setattr(shallow, name, depth)
    return shallow
