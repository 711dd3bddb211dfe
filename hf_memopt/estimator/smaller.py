"""Smaller variants of a model that is trained from scratch: fewer layers, narrower, fewer experts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, as_input_error, brief, choose
from hf_memopt.estimator.architectures import is_bundled
from hf_memopt.estimator.model_sizes import check_sizes

# Fields of a configuration that are not sizes of the model.
_NO_SIZES = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path", "source")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_DEPTH_SHARES = (3 / 4, 1 / 2, 1 / 4)  # of the model's layers
_HALVINGS = 3  # at most, of the width or of the experts


def with_sizes(config, changes: Mapping[str, Any]):
    """A configuration with other sizes of its text model, as `--set model.KEY=VALUE` changes them.

    Fields with a value per layer (layer_types) are cut or repeated to the new depth. A head size that was width /
    heads stays so, and a model without grouped keys gets none.

    Args:
        changes: field -> value, by the configuration's own names or transformers' common ones (num_hidden_layers).

    Raises:
        InputError: a field that the configuration lacks, a value of another type, or sizes that are incompatible.
    """
    text = config.get_text_config()
    content = config.to_dict()
    content.pop("_name_or_path", None)  # the checkpoint's weights do not fit the new sizes
    section = content if text is config else content[next(key for key, part in vars(config).items() if part is text)]
    names = text.attribute_map
    before = dict(section)
    for field, value in changes.items():
        name = names.get(field, field)
        fields = {key for key, old in before.items() if key not in _NO_SIZES and not isinstance(old, list | dict)}
        if name not in fields:
            raise choose("model field", field, fields | names.keys())
        _check_type(field, value, before[name])
        section[name] = value
    _follow(section, before, {names.get(field, field) for field in changes}, names)
    check_sizes(content, "model")
    with as_input_error("model", Exception):  # configuration classes raise anything
        return type(config).from_dict(content)


def _check_type(name: str, value: Any, old: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    has_type = {
        bool: isinstance(value, bool),
        int: number and isinstance(value, int),
        float: number,
        str: isinstance(value, str),
    }.get(type(old), True)  # None: transformers derives the value
    if not has_type:
        raise InputError(f"model.{name}={brief(value)} must be of the type of {old!r}, which the model has")


def _follow(section: dict[str, Any], before: Mapping[str, Any], changed: set[str], names: Mapping[str, str]) -> None:
    """Adapt the fields that depend on the changed ones."""
    common = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    depth, width, heads = (names.get(name, name) for name in common)
    if depth in changed:
        for name, kinds in before.items():
            if isinstance(kinds, list) and len(kinds) == before[depth] > 1:
                section[name] = (kinds * -(-section[depth] // len(kinds)))[: section[depth]]
    if not {width, heads} & changed or not section.get(heads):
        return
    shared = "num_key_value_heads"
    if shared not in changed and before.get(shared) == before[heads]:
        section[shared] = section[heads]
    if "head_dim" in changed or before.get("head_dim") not in (None, before[width] // before[heads]):
        return
    if section[width] % section[heads]:
        raise InputError(
            f"model: {heads}={section[heads]} does not divide {width}={section[width]}: set model.{heads} too"
        )
    if before.get("head_dim"):
        section["head_dim"] = section[width] // section[heads]


def is_from_scratch(config) -> bool:
    """True if a configuration has no trained weights beside it, so that its sizes may be others."""
    if not config.name_or_path:
        return True  # created in a program, or by with_sizes()
    path = Path(config.name_or_path)
    if is_bundled(path) or not path.exists():  # a hub id
        return False
    folder = path if path.is_dir() else path.parent
    return not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())


def find_experts(config) -> str | None:
    """The field with the number of experts in each layer of a configuration's text model; None where it has none."""
    return next((name for name in _EXPERTS if getattr(config.get_text_config(), name, None)), None)


def smaller_sizes(config) -> Iterator[list[dict[str, int]]]:
    """Changes for with_sizes(), a list for each way to shrink a model, the smallest step first."""
    text = config.get_text_config()
    layers = text.num_hidden_layers
    yield [{"num_hidden_layers": int(layers * share)} for share in _DEPTH_SHARES if layers * share >= 1]
    yield list(_narrower(text))
    if experts := find_experts(config):
        active, number = getattr(text, "num_experts_per_tok", None) or 1, getattr(text, experts)
        fewer = [number // 2**power for power in range(1, _HALVINGS + 1)]
        yield [{experts: count} for count in fewer if count >= max(1, active)]


def _narrower(text) -> Iterator[dict[str, int]]:
    """Half the width and half the heads, so that the head size stays; and again."""
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads")
    sizes = {name: size for name in names if isinstance(size := getattr(text, name, None), int)}
    for _ in range(_HALVINGS):
        if any(sizes[name] % 2 for name in names[:2]):
            return
        sizes = {name: max(1, size // 2) for name, size in sizes.items()}
        yield sizes
