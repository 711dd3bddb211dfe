"""From what a user calls a model to its configuration."""

import re
from pathlib import Path

from hf_memopt.errors import InputError, as_input_error, one_line

_FOLDER = Path(__file__).parent / "architectures"


def list_architectures() -> list[str]:
    """Names of the bundled architectures."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_config(model):
    """The configuration of a bundled architecture's name, hub id, folder, config.json, or itself.

    Raises:
        InputError: nothing of that name can be read.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, PretrainedConfig):
        return model
    bundled = _bundled(str(model))
    if bundled and not Path(model).exists():
        return AutoConfig.from_pretrained(bundled)
    if Path(model).exists() or "/" in str(model):
        with as_input_error(f"model {model!r}", ValueError, KeyError):
            try:
                return AutoConfig.from_pretrained(model)
            except OSError as error:
                raise _unknown(model, one_line(error)) from error
    raise _unknown(model, "no such folder or hub id")


def _bundled(model: str) -> Path | None:
    """The file of a bundled architecture, by its name or by the hub id that it was taken from."""
    named = _FOLDER / f"{model.lower()}.json"
    if named.is_file():
        return named
    source = f"https://huggingface.co/{model}/"
    return (
        next((path for path in sorted(_FOLDER.glob("*.json")) if source in path.read_text()), None)
        if "/" in model
        else None
    )


def hub_id(model: str) -> str:
    """Where a bundled architecture's weights are; any other name stays as it is."""
    named = _FOLDER / f"{str(model).lower()}.json"
    if Path(model).exists() or not named.is_file():
        return str(model)
    found = re.search(r"https://huggingface\.co/([\w.-]+/[\w.-]+)", named.read_text())
    return found[1] if found else str(model)


def _unknown(model, reason: str) -> InputError:
    return InputError(f"model {str(model)!r}: {reason[:200]}. Bundled names: {', '.join(list_architectures())}")
