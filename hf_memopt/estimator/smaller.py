"""A model of other sizes: fewer layers, narrower, fewer experts; for models that are trained from scratch."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, as_input_error, brief, choose
from hf_memopt.estimator.architectures import is_bundled
from hf_memopt.estimator.model_sizes import check_sizes

# Of a configuration's fields, what is no size of the model.
_NO_SIZES = ("model_type", "architectures", "transformers_version", "dtype", "_name_or_path", "source")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_PARTS_OF_DEPTH = (3 / 4, 1 / 2, 1 / 4)
_HALVINGS = 3


def with_sizes(config, changes: Mapping[str, Any]):
    """A configuration with other values of its text model's fields, as `--set model.KEY=VALUE` has them.

    Settings of every layer (layer_types) are cut or repeated to the new depth; a head's size that followed from the
    model's width follows from the new one, and heads that each had keys of their own keep them.

    Args:
        changes: field, by the configuration's own or transformers' common name (num_hidden_layers), to value.

    Raises:
        InputError: a field that the configuration lacks, a value of another type, or sizes that do not go together.
    """
    text = config.get_text_config()
    content = config.to_dict()
    content.pop("_name_or_path", None)  # its weights are not this model's
    section = content if text is config else content[next(key for key, part in vars(config).items() if part is text)]
    names = text.attribute_map
    before = dict(section)
    for given, value in changes.items():
        name = names.get(given, given)
        fields = {key for key, old in before.items() if key not in _NO_SIZES and not isinstance(old, list | dict)}
        if name not in fields:
            raise choose("model field", given, fields | names.keys())
        _check_type(given, value, before[name])
        section[name] = value
    _follow(section, before, {names.get(given, given) for given in changes}, names)
    check_sizes(content, "model")
    with as_input_error("model", Exception):  # what a configuration's class raises is its own
        return type(config).from_dict(content)


def _check_type(name: str, value: Any, old: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    holds = {
        bool: isinstance(value, bool),
        int: number and isinstance(value, int),
        float: number,
        str: isinstance(value, str),
    }.get(type(old), True)  # None stands for a value that is worked out
    if not holds:
        raise InputError(f"model.{name}={brief(value)} must be of the type of {old!r}, which the model has")


def _follow(section: dict[str, Any], before: Mapping[str, Any], changed: set[str], names: Mapping[str, str]) -> None:
    """What follows from the changed sizes."""
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
    """Whether a configuration has no trained weights beside it, so that its sizes may be others."""
    if not config.name_or_path:
        return True  # made by a program, or with_sizes()
    path = Path(config.name_or_path)
    if is_bundled(path) or not path.exists():  # of a hub id
        return False
    folder = path if path.is_dir() else path.parent
    return not any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())


def smaller_sizes(config) -> Iterator[list[dict[str, int]]]:
    """For each direction in which a model can shrink, changes for with_sizes(), the smallest step first."""
    text = config.get_text_config()
    layers = text.num_hidden_layers
    yield [{"num_hidden_layers": int(layers * part)} for part in _PARTS_OF_DEPTH if layers * part >= 1]
    yield list(_narrower(text))
    if experts := next((name for name in _EXPERTS if getattr(text, name, None)), None):
        chosen, number = getattr(text, "num_experts_per_tok", None) or 1, getattr(text, experts)
        fewer = [number // 2**power for power in range(1, _HALVINGS + 1)]
        yield [{experts: left} for left in fewer if left >= max(1, chosen)]


def _narrower(text) -> Iterator[dict[str, int]]:
    """Half as wide, and again: with half the heads, so that a head stays as large as it is."""
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_key_value_heads")
    sizes = {name: size for name in names if isinstance(size := getattr(text, name, None), int)}
    for _ in range(_HALVINGS):
        if any(sizes[name] % 2 for name in names[:2]):
            return
        sizes = {name: max(1, size // 2) for name, size in sizes.items()}
        yield sizes
