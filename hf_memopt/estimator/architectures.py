"""A model's configuration from a hub id, a path or the name of a bundled architecture."""

import difflib
import os
import re
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error, brief, one_line
from hf_memopt.estimator.model_sizes import check_sizes
from hf_memopt.field_values import check_value
from hf_memopt.files import check_links
from hf_memopt.hub_names import hub_name, is_cached, why_no_hub
from hf_memopt.other_names import plain_word

_FOLDER = Path(__file__).parent / "architectures"
_PATH = re.compile(r"[./~\\]|[A-Za-z]:\\|.*\\|.*\.json$")  # what only a path begins or ends with
_HUB_ID = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.ASCII)


def list_architectures() -> list[str]:
    """Names of the bundled architectures."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def is_bundled(path: Path) -> bool:
    """True if a file is a bundled architecture."""
    return path.parent == _FOLDER


def is_bundled_id(model: str) -> bool:
    """True if a name or hub id is a bundled architecture's, or one of the same sizes."""
    return _find(model) is not None


def load_config(model):
    """The configuration of a model: a bundled architecture's name, hub id, folder, config.json, or PretrainedConfig.

    Code that comes with a model is never run, and transformers never asks on stdin whether it may.

    Raises:
        InputError: nothing of that name can be read, or it is not the configuration of a model.
    """
    from transformers import PretrainedConfig

    config = model if isinstance(model, PretrainedConfig) else _named_config(model)
    # MusicGen's decoder generates audio: which of its parts the layers and the vocabulary belong to is not said.
    with as_input_error(f"model type {config.model_type!r} cannot be estimated", ValueError):
        text = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise InputError(f"model type {config.model_type!r}: text_config={brief(text)} is not a configuration")
    return config


def read_name(model: str) -> str:
    """A model's name as it is looked up: of a hub page's address its hub id; of a bundled name in another spelling
    ("Qwen3 8B") the bundled one. Judged from the words alone, without an import of transformers.

    Raises:
        InputError: a path where nothing is, or a name that is neither bundled nor a hub id.
    """
    check_value("model", str, model)
    name = hub_name(str(model))
    if not name.strip():
        raise _unknown(model, "no name")
    try:
        if Path(name).expanduser().exists():
            return os.path.expanduser(name)
    except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have
        raise InputError(f"model {brief(name)}: {one_line(error)[:80]}") from error
    if _PATH.match(name) or name.count("/") > 1:
        raise InputError(f"model {brief(name)}: no such file or folder (looked in {Path.cwd()})")
    if bundled := _find(name):
        return name if name.lower() in _names() else bundled.name
    if not _HUB_ID.fullmatch(name):
        raise _unknown(model, "no such folder or hub id")
    return name


def _find(name: str) -> "_Bundled | None":
    """The bundled architecture of a name in any case, and with any separators between its letters and numbers."""
    return _names().get(str(name).lower()) or _spelled().get(_parts(name))


def _named_config(model):
    name = read_name(model)
    bundled = _find(name)
    if bundled and not Path(name).exists():
        config = read_config(bundled.path)
        config.update(bundled.fields)
        return config
    check_reachable(name)
    try:
        return read_config(name, local_files_only=not Path(name).exists() and why_no_hub() is not None)
    except OSError as error:
        raise _unknown(model, one_line(error)) from error


def check_reachable(model: str) -> None:
    """Refuse a hub id that is not in the cache while the hub cannot be asked.

    Raises:
        InputError: it says why, and which bundled names are near.
    """
    if _find(model) or Path(model).exists() or is_cached(model):
        return
    if reason := why_no_hub():
        raise _unknown(model, f"not in this machine's cache, and {reason}")


def read_config(model, trust_remote_code: bool = False, local_files_only: bool = False):
    """The configuration of a hub id, a folder or a config.json, with checked sizes.

    Args:
        trust_remote_code: run code that comes with the model (None would have transformers ask on stdin).
        local_files_only: ask nothing of the hub.

    Raises:
        InputError: it is not a configuration, or needs code that must not be run.
        OSError: it cannot be found or read.
    """
    from transformers import AutoConfig, PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    where = f"model {brief(str(model))}"
    try:
        if Path(model).is_dir():
            check_links(Path(model))
        content, _ = PretrainedConfig.get_config_dict(model, local_files_only=local_files_only)
        kind = content.get("model_type")
        if "AutoConfig" in (content.get("auto_map") or {}) and kind not in CONFIG_MAPPING and not trust_remote_code:
            raise InputError(
                f"{where} needs code that comes with it (auto_map in its config.json), which is not run: read that "
                "code, then pass --trust_remote_code true to a recipe; estimate, plan and advise take models that "
                "transformers itself has, and dry-run a script that loads it"
            )
        check_value("architectures", list[str] | None, content.get("architectures"), f"{where}: ")
        check_sizes(content, where)
        return AutoConfig.from_pretrained(
            model, trust_remote_code=trust_remote_code, local_files_only=local_files_only
        )
    except (InputError, OSError):
        raise
    except Exception as error:  # configuration classes raise anything for values that they refuse
        raise InputError(f"{where}: its config.json cannot be used: {one_line(error)[:300]}") from error


@dataclass(frozen=True)
class _Bundled:
    """What a name stands for.

    Attributes:
        path: the file with the sizes.
        hub_id: of the model that was named.
        name: that it is printed by.
        fields: of its config.json that differ from the file's.
    """

    path: Path
    hub_id: str
    name: str
    fields: dict[str, int] = field(default_factory=dict)


@cache
def _names() -> dict[str, _Bundled]:
    """Name -> bundled architecture: files' names, hub ids and these without their owner, in small letters."""
    names = {}
    for path in sorted(_FOLDER.glob("*.json")):
        source = re.search(r"https://huggingface\.co/([\w.-]+/[\w.-]+)", path.read_text(encoding="utf-8"))
        names[path.stem] = _Bundled(path, source[1] if source else path.stem, path.stem)
    sources = {model.hub_id: model for model in names.values()}
    for group in tomllib.loads((_FOLDER / "instruct.toml").read_text(encoding="utf-8")).values():
        for base, hub_id in group.pop("models").items():
            name = f"{base}-instruct"
            sources[hub_id] = names[name] = _Bundled(_FOLDER / f"{base}.json", hub_id, name, group)
    for base, copies in tomllib.loads((_FOLDER.parent / "same_sizes.toml").read_text(encoding="utf-8")).items():
        for hub_id in copies:
            sources.setdefault(hub_id, _Bundled(_FOLDER / f"{base}.json", hub_id, hub_id))
    for hub_id, model in sources.items():
        for name in (hub_id.lower(), hub_id.lower().split("/")[-1]):
            names.setdefault(name, model)
    return names


@cache
def _spelled() -> dict[tuple[str, ...], _Bundled]:
    """Letters and numbers of a name -> what it stands for, where that is one model."""
    spelled: dict[tuple[str, ...], set[str]] = {}
    for name, bundled in _names().items():
        spelled.setdefault(_parts(name), set()).add(bundled.hub_id)
    return {_parts(name): bundled for name, bundled in _names().items() if len(spelled[_parts(name)]) == 1}


def _parts(name: str) -> tuple[str, ...]:
    """Letters and numbers, in order: the same of "Qwen2.5 VL-7B" and "qwen2.5vl-7b", and others of "qwen-257b"."""
    return tuple(re.findall(r"[a-z]+|\d+", str(name).lower()))


def hub_id(model: str) -> str:
    """The hub id of a bundled architecture; any other name as it is."""
    bundled = _find(model)
    return bundled.hub_id if bundled and not Path(model).exists() else str(model)


_QUANTIZED = re.compile(r"([-_.](unsloth|bnb|awq|gptq|gguf|int[48]|fp8|[48][-_]?bits?|q\d\w*))+$")


def _unknown(model, reason: str) -> InputError:
    sentence = reason.split(". ")[0].rstrip(".")[:200]
    near = " or ".join(repr(name) for name in _nearest_names(str(model)))
    kinds = "a model is a hub id, a folder, a config.json or a name as 'llama-3.1-8b'"
    return InputError(f"model {brief(str(model))}: {sentence}; {f'did you mean {near}?' if near else kinds}")


def _nearest_names(model: str) -> list[str]:
    """Return at most three bundled names that look like a name: a hub id by what follows its owner."""
    name, known = model.lower().split("/")[-1][:100], list_architectures()
    name = _QUANTIZED.sub("", name)  # the method quantizes, whatever copy of the weights is asked for
    longer = [other for other in known if len(name) > 2 and plain_word(other).startswith(plain_word(name))]
    return list(dict.fromkeys([*longer, *difflib.get_close_matches(name, known, n=3, cutoff=0.6)]))[:3]
