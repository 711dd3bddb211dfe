"""Values of theirs that no table can list: files of engines, lists of modules, sizes in words."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hf_memopt.engines.engine import read_settings
from hf_memopt.engines.fsdp import fsdp_settings
from hf_memopt.errors import InputError, brief
from hf_memopt.files import read_json
from hf_memopt.foreign.key_table import Table, is_off
from hf_memopt.yaml_values import module_names, read_yaml

_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
# What shipped DeepSpeed files leave to the Trainer.
AUTO = {**dict.fromkeys(_SIZES, "auto"), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}


def deepspeed(value: Any, table: Table, folder: Path) -> Any:
    """DeepSpeed's settings, of a file beside theirs or of one that their tool ships.

    Raises:
        InputError: neither there nor known, or not modelled.
    """
    settings = _deepspeed_settings(value, table, folder)
    if isinstance(settings, Mapping) and "tensor_parallel" in settings:
        raise InputError("DeepSpeed's tensor parallelism is not modelled")
    return settings


def _deepspeed_settings(value: Any, table: Table, folder: Path) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    text = str(value)
    if text.lstrip().startswith("{"):
        return dict(read_settings(text.strip(), "deepspeed"))
    for path in (folder / text, Path(text)):
        if path.suffix == ".json" and path.is_file():
            return read_json(path)
    if content := table.engines.get(text.rpartition("/")[2].removesuffix(".json")):
        return {**AUTO, **content}
    raise InputError(f"{brief(text)} is neither a file here nor one that {table.name} {table.version} ships")


def fsdp(value: Any, table: Table, folder: Path) -> dict[str, Any]:
    """FSDP's settings, of a mapping, a JSON text or a file, in the words of TrainingArguments.

    Raises:
        InputError: it is neither, or the file is not here.
    """
    if not isinstance(value, Mapping | str):
        raise InputError(f"{brief(value)} is neither a mapping nor a file")
    named = isinstance(value, str) and value.endswith(".json")
    settings = fsdp_keys(fsdp_settings(None, str(folder / value) if named else value))
    settings.pop("final_state_dict_type", None)  # of what is saved
    return settings


def fsdp_keys(settings: Mapping[str, Any]) -> dict[str, Any]:
    """FSDP's settings under accelerate's keys, without fsdp_, under those of TrainingArguments."""
    own = dict(settings)
    if "offload_params" in own:
        own["cpu_offload"] = not is_off(own.pop("offload_params"))
    if sharding := own.pop("sharding_strategy", None):  # FSDP1's word for it
        own["reshard_after_forward"] = str(sharding).lower()
    return own


def fsdp1(value: Any, table: Table, folder: Path) -> dict[str, Any]:
    """FSDP's settings of a tool that takes version 1 by default."""
    return {"version": 1, **fsdp(value, table, folder)}


def modules(value: Any, *_: Any) -> Any:
    return module_names(value)


def mapping(value: Any, *_: Any) -> Any:
    """A mapping, which may be written as JSON.

    Raises:
        InputError: it is something else.
    """
    value = read_yaml(value, "value") if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise InputError(f"{brief(value)} is not a mapping")
    return dict(value)


def words(value: Any, *_: Any) -> str:
    """Words in one text, of a list or a text."""
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def first_name(value: Any, *_: Any) -> Any:
    """The first of several data sets, by its path."""
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, Mapping):
        first = first.get("path") or next(iter(first), None)
    return re.split(r"[,\s]+", str(first).strip())[0].partition("#")[0] if not is_off(first) else None


def nothing(*_: Any) -> None:
    """The default of ours that is not a preset's."""


def component(value: Any, table: Table, _: Path) -> str:
    """The hub id of a torchtune model, by the name of its function.

    Raises:
        InputError: its sizes are not known.
    """
    name = re.sub(r"^q?lora_", "", str(value).rpartition(".")[2])
    if name not in table.models:
        raise InputError("the model that this component builds is not known")
    return table.models[name]


VIA: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (deepspeed, fsdp, fsdp1, modules, mapping, words, first_name, nothing, component)
}
