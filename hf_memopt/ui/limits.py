"""Limits of a question's cost, and of what strangers may ask on a public instance."""

import re
from dataclasses import dataclass

from hf_memopt.errors import InputError, accepted, brief, choose
from hf_memopt.estimator.architectures import is_bundled_id
from hf_memopt.hardware import list_hardware
from hf_memopt.hardware.catalog import read_devices
from hf_memopt.hub_names import hub_name
from hf_memopt.presets import METHODS
from hf_memopt.ui.question import Question
from hf_memopt.units import GIB

_HUB_ID = re.compile(
    r"[A-Za-z0-9][\w-]{0,95}(\.[\w-]{1,40}){0,5}/[A-Za-z0-9][\w-]{0,95}(\.[\w-]{1,40}){0,5}", re.ASCII
)
_VALUE = re.compile(r"[A-Za-z0-9][\w.+-]{0,40}", re.ASCII)  # neither a path nor JSON
_WORDS = re.compile(r"[A-Za-z0-9_ ×*-]{1,80}")
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
    "image_size",
    "images",
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


def check_public(question: Question) -> None:
    """Let through what strangers may ask.

    Raises:
        InputError: a file, a path, an unknown card or method, too long a sample, or a setting that is not in SETTINGS.
    """
    if question.config:  # it may name paths of this machine
        raise InputError("a YAML is answered on a machine of your own, by hf-memopt ui there")
    if not is_bundled_id(question.model) and not _HUB_ID.fullmatch(hub_name(question.model)):
        raise InputError(
            f"model {brief(question.model)}: give a bundled model's name or a hub id, as in Qwen/Qwen3-8B"
        )
    if not _WORDS.fullmatch(question.hardware):  # neither a path nor JSON
        raise choose("hardware", question.hardware[:100], list_hardware())
    read_devices(question.hardware)
    accepted("method", question.method, ("any", *METHODS))
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
