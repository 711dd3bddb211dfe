"""The base model without weights, as its checkpoint and an adapter to it describe it."""

import copy
from pathlib import Path

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from hf_memopt.contrib.merging.adapter import WEIGHTS
from hf_memopt.contrib.merging.base import Base
from hf_memopt.errors import InputError, as_input_error
from hf_memopt.field_values import check_value

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


class Skeleton:
    """The base model on the meta device.

    Attributes:
        model: it, until an adapter is put into it.
        config: config.json of the merged model.
        shapes: name -> shape of its parameters and buffers.
        tied: name of a parameter that shares a weight -> the one whose weight it shares.

    Raises:
        InputError: a class that transformers does not have, such as one that comes with its model.
    """

    def __init__(self, base: Base, adapter: Path) -> None:
        self.config = {name: value for name, value in base.config.items() if name != "quantization_config"}
        kind = _model_class(base)
        # Configuration classes and models raise anything for values that they refuse.
        with as_input_error(f"{base.folder / 'config.json'} cannot be used", Exception):
            config = kind.config_class.from_dict(copy.deepcopy(self.config))
            text = config.get_text_config()
            if (rows := _embedding_rows(adapter)) is not None and rows != text.vocab_size:
                text.vocab_size = rows
                section = self.config if "vocab_size" in self.config else self.config.setdefault("text_config", {})
                section["vocab_size"] = rows
            with torch.device("meta"):
                self.model = kind(config)
        self.shapes = {name: tuple(weight.shape) for name, weight in self.model.state_dict().items()}
        self.tied: dict[str, str] = dict(self.model.all_tied_weights_keys) if text.tie_word_embeddings else {}
        transforms = get_model_conversion_mapping(self.model)
        self._renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
        self._converters = [item for item in transforms if isinstance(item, WeightConverter)]

    def find_parameter(self, name: str) -> str | None:
        """The parameter that a checkpoint's tensor becomes; None where it becomes a part of one, or several.

        transformers 5 renames on loading, and fuses or splits what a WeightConverter names (experts, for instance).
        """
        prefix = self.model.base_model_prefix
        renamed, pattern = rename_source_key(name, self._renamings, self._converters, prefix, self.shapes)
        return renamed if pattern is None else None


def _model_class(base: Base) -> type:
    import transformers

    named, where = base.config.get("architectures"), f"{base.folder / 'config.json'}: "
    check_value("architectures", list[str] | None, named, where)
    check_value("model_type", str | None, base.config.get("model_type"), where)
    name = (named or ["a class without a name"])[0]
    kind = getattr(transformers, name, None)
    if "auto_map" in base.config or not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise InputError(
            f"{base.folder} is of {name}, which transformers does not have: use peft's merge_and_unload()"
        )
    return kind


def _embedding_rows(adapter: Path) -> int | None:
    """Rows of the embedding that an adapter holds, which training may have extended; None where it holds none."""
    from safetensors import safe_open

    with safe_open(adapter / WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (a file of safetensors is no mapping)
            if name.endswith(_EMBEDDINGS):
                return file.get_slice(name).get_shape()[0]
    return None
