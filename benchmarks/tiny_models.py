"""A tiny configuration of any model type, made from the fields of its class, and the real step that it takes."""

import dataclasses
import re
import tomllib
from pathlib import Path

from jobs import trained_peak

LAYERS = 2
LENGTH = 32
_HYBRID = 4
_VOCABULARY = 512
_SIZES = tomllib.loads((Path(__file__).parent / "data" / "tiny_sizes.toml").read_text())["sizes"]
_IDS = re.compile(r".*(_token_id|_token_index|_id|_idx|_token_ids)")


# Fields without which no model can be made, and for which some classes have no default.
_MISSING = {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1, "n_routed_experts": 4, "num_experts": 4}


def tiny_config(kind: type, small: bool = True, layers: int = LAYERS):
    """A configuration of a class with few layers.

    Args:
        small: with small widths too, where the class does not compute with others; otherwise its own.
    """
    default = kind()
    if "linear_attention" in (getattr(default, "layer_types", None) or ()):
        layers = max(layers, _HYBRID)  # at least one of another kind
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    changed = {}
    for name, value in vars(default).items():
        name = name.lstrip("_")
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            changed[name] = tiny_config(type(value), small, layers)
        elif name in fields and (size := _tiny(name, value, small, layers)) is not None:
            changed[name] = size
    heads = vars(default)  # not by attribute: some classes refuse that where layers differ
    if heads.get("num_key_value_heads") == heads.get("num_attention_heads", 0):  # not grouped
        changed.pop("num_key_value_heads", None)
        if "num_key_value_heads" in fields and "num_attention_heads" in changed:
            changed["num_key_value_heads"] = changed["num_attention_heads"]
    missing = {name: value for name, value in _MISSING.items() if name in fields and heads.get(name) is None}
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "rope_theta" in rope and rope["rope_theta"] is None:
        missing["rope_parameters"] = {**rope, "rope_theta": 10_000.0}
    try:
        return kind(**(missing | changed))
    except ValueError:  # some classes describe each of the default's layers
        if "mlp_layer_types" not in fields:
            raise
        first, *_, last = default.mlp_layer_types
        return kind(**(missing | changed | {"mlp_layer_types": [first] + [last] * (layers - 1)}))


def _tiny(name: str, value, small: bool, layers: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    if _IDS.fullmatch(name):
        return value % _VOCABULARY if small and value >= _VOCABULARY else None
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            depth = size == "depth"
            size = layers if depth else size
            return size if size < value and (small or depth) else None
    return None


def real_batch(shapes: dict, task: str) -> dict:
    """Tensors of the shapes of a micro-batch with values that models take."""
    import torch

    def tensor(name, shape, dtype):
        if dtype.is_floating_point:
            return torch.rand(shape, dtype=dtype)
        if name == "input_ids" or (name == "labels" and (task.endswith("lm") or "seq2seq" in task)):
            return torch.randint(5, 50, shape)
        return torch.ones(shape, dtype=dtype) if task == "ctc" else torch.zeros(shape, dtype=dtype)

    return {name: tensor(name, *row) for name, row in shapes.items()}


def measured_peak(config, task: str, micro: int) -> int:
    """Bytes: the allocator's peak over model, two steps and all between."""
    import torch
    import transformers

    from hf_memopt.estimator.tracing.pair_loss import with_pair_loss
    from hf_memopt.estimator.tracing.tasks import EMBEDDINGS, TASKS, batch_shapes, with_token_ids

    pairs = task == EMBEDDINGS
    batch = real_batch(batch_shapes(task, config, micro, LENGTH, padded=pairs), task)
    if pairs:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][..., -1] = 0  # of each text: with a mask of ones alone attention has none
    rows = [{name: value[index] for name, value in batch.items()} for index in range(micro)] * 8
    if task == "image-classification":
        rows = [{**row, "labels": int(row["labels"])} for row in rows]

    def make_model():
        torch.manual_seed(0)
        auto = getattr(transformers, TASKS[task].auto_class)
        model = auto.from_config(with_token_ids(config), dtype=torch.float32)
        return with_pair_loss(model) if pairs else model

    return trained_peak(make_model, {"per_device_train_batch_size": micro, "remove_unused_columns": False}, rows)
