"""Limits of a question's cost, and of what strangers may ask on a public instance."""

import re
from dataclasses import dataclass
from pathlib import Path

from hf_memopt.errors import InputError, brief, choose
from hf_memopt.hardware import list_hardware
from hf_memopt.presets import METHODS
from hf_memopt.ui.question import Question
from hf_memopt.units import GIB

_HUB_ID = re.compile(
    r"[A-Za-z0-9][\w-]{0,95}(\.[\w-]{1,40}){0,5}/[A-Za-z0-9][\w-]{0,95}(\.[\w-]{1,40}){0,5}", re.ASCII
)
_VALUE = re.compile(r"[A-Za-z0-9][\w.+-]{0,40}", re.ASCII)  # neither a path nor JSON
_DEVICES = re.compile(r"([a-z0-9_]{1,60}?)(?:x([1-9]\d{0,2}))?", re.ASCII)
_LONGEST_SAMPLE = 2**20  # tokens
_MOST_SETTINGS = 20
# Settings that change memory and neither name a file nor write or send anything.
SETTINGS = (
    "activation_compression",
    "attn_implementation",
    "bf16",
    "dtype",
    "fp16",
    "frame_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "lora.r",
    "loss_chunk_size",
    "max_frames",
    "mlp_tile_size",
    "optim",
    "packed",
    "padded",
    "per_device_train_batch_size",
)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of one question.

    Attributes:
        seconds: time after which its process is ended.
        memory_bytes: resident memory of its processes together, in bytes, above which they are ended.
        public: whether strangers ask: models by name or hub id alone, few settings, none of this process's secrets.
    """

    seconds: float = 300.0
    memory_bytes: int = 8 * GIB
    public: bool = False


def bundled_models() -> list[str]:
    """Names of the bundled architectures, sorted, without an import of torch."""
    return sorted(file.stem for file in (Path(__file__).parents[1] / "estimator" / "architectures").glob("*.json"))


def check_public(question: Question) -> None:
    """Let through what strangers may ask.

    Raises:
        InputError: a path, an unknown card or method, too long a sample, or a setting that is not in SETTINGS.
    """
    if question.model not in bundled_models() and not _HUB_ID.fullmatch(question.model):
        raise InputError(
            f"model {brief(question.model)}: give a bundled model's name or a hub id, as in Qwen/Qwen3-8B"
        )
    hardware = _DEVICES.fullmatch(question.hardware)
    # A name may itself end in x and a number: the whole is looked up first.
    if question.hardware not in list_hardware() and (not hardware or hardware[1] not in list_hardware()):
        raise choose("hardware", question.hardware[:100], list_hardware())
    if question.method not in ("any", *METHODS):
        raise choose("method", question.method[:100], ("any", *METHODS))
    for name in ("tokens", "price"):
        if (amount := getattr(question, name)) and not _VALUE.fullmatch(amount):
            raise InputError(f"{name}={brief(amount)}: give a number")
    if question.seq_len is not None and not 1 <= question.seq_len <= _LONGEST_SAMPLE:
        raise InputError(f"seq_len={question.seq_len}: give 1 to {_LONGEST_SAMPLE} tokens")
    if len(question.settings) > _MOST_SETTINGS:
        raise InputError(f"{len(question.settings)} settings: give at most {_MOST_SETTINGS}")
    for setting in question.settings:
        name, _, value = setting.partition("=")
        if name not in SETTINGS:
            raise choose("setting", name[:100], SETTINGS)
        if not _VALUE.fullmatch(value):
            raise InputError(f"{name}={brief(value)}: give a number or a word")
