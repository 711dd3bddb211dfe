"""Options that several commands take, of app.py and of packages above the core, and what a shell completes."""

import math
import re
import sys
from typing import Annotated

import typer

from hf_memopt.units import GIB, MIB, read_bytes, read_number

_SMALLEST = 16 * MIB  # bytes of memory that a person means


def count(value: str | int | None, param: typer.CallbackParam) -> int | None:
    """A number of samples, devices or machines, as people write it.

    Raises:
        typer.BadParameter: it is no whole number, less than 1, or too large for a size in a tensor's shape.
    """
    return None if value is None else _whole(value, read_number(str(value), of=param.name))


def length(value: str | int | None) -> int | None:
    """A number of tokens: 2048, 8k (8,192), "2k tokens".

    Raises:
        typer.BadParameter: as count() raises it.
    """
    return None if value is None else _whole(value, read_number(str(value), thousand=1024, of="tokens"))


def _whole(written: str | int, number: float | None) -> int:
    if re.fullmatch(r"\d{1,3}(\.000)+", str(written)):
        raise typer.BadParameter(f"{written!r} may be {int(number)} or a thousand times that: leave the point out")
    if number is None or number != int(number):
        raise typer.BadParameter(f"{written!r} is no whole number, as in 2048 or 2k")
    if not 1 <= number < 2**31:
        raise typer.BadParameter(f"{int(number)} must be at least 1{', and below 2147483648' if number > 0 else ''}")
    if not re.sub("[_,]", "", str(written).split()[0]).isdecimal():
        print(f"note: {written} is taken as {int(number):,}", file=sys.stderr)
    return int(number)


def size(value: str | float | None) -> int | None:
    """Bytes of a size in GiB, or in the unit that is written: 20, "20 GiB", 24GB.

    Raises:
        typer.BadParameter: it is no size, 0 or less, or infinite.
    """
    if value is None:
        return None
    written = read_bytes(str(value))
    plain = read_number(str(value))
    count = written if written is not None else plain and plain * GIB
    if count is None:
        raise typer.BadParameter(f"{value!r} is no size in GiB, as in 20, 20GiB or 24GB")
    if not 0 < count < 2**63:
        raise typer.BadParameter(f"{value} must be above 0, and finite")
    if written is not None and count < _SMALLEST:
        raise typer.BadParameter(f"{value!r} is {count:,.0f} bytes, which no job fits: write 24 or 24GB for gigabytes")
    return int(count)


def preset_names(incomplete: str) -> list[str]:
    """Preset names that begin so, for the shell's completion."""
    from hf_memopt.presets import list_presets

    return [name for name in ["auto", *list_presets()] if name.startswith(incomplete)]


def method_names(incomplete: str) -> list[str]:
    from hf_memopt.presets import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Bundled architectures that begin so."""
    from hf_memopt.estimator.architectures import list_architectures

    return [name for name in list_architectures() if name.startswith(incomplete)]


def hardware_names(incomplete: str) -> list[str]:
    from hf_memopt.hardware import list_hardware

    return [name for name in list_hardware() if name.startswith(incomplete)]


def positive(value: float | None) -> float | None:
    """A number of GiB or seconds, unchanged.

    Raises:
        typer.BadParameter: it is 0 or less, or infinite or NaN, which click's own ranges accept.
    """
    if value is not None and not 0 < value < math.inf:
        raise typer.BadParameter(f"{value} must be above 0, and finite")
    return value


def length_or_max(value: str | None) -> int | str | None:
    """A number of tokens, or "max".

    Raises:
        typer.BadParameter: neither.
    """
    if value is None or value.strip().lower() == "max":
        return value and "max"
    if read_number(value, of="tokens") is None:
        raise typer.BadParameter(f"{value!r} is neither a number of tokens nor max")
    return length(value)


Length = Annotated[
    str | None,
    typer.Option(
        "--seq-len",
        metavar="TOKENS",
        callback=length,
        help="Tokens per sample, as in 2048 or 8k. Default: the preset's.",
    ),
]
WorldSize = Annotated[
    str | None,
    typer.Option(
        "--world-size",
        metavar="N",
        callback=count,
        help="Devices that train together. Default: the preset's, or those that --hardware counts.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="Print tables of memory, speed and reasons instead of the short answer."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the files of another export.")]
Method = Annotated[str, typer.Option("--method", help="full, lora or qlora.", autocompletion=method_names)]
Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy", help="How several devices train together: ddp, fsdp2, zero1, zero2, zero3, tp8, hsdp8, …"
    ),
]
SequenceParallel = Annotated[
    str,
    typer.Option(
        "--sequence-parallel",
        metavar="N",
        callback=count,
        help="Number of devices that share each sample's tokens, for long samples: by Ulysses under ZeRO; estimates "
        "under fsdp2 by context parallelism.",
    ),
]

Precision = Annotated[
    str | None, typer.Option("--precision", help="fp8: matmuls in 8 bits, on GPUs with fp8 units; needs torchao.")
]


Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="A TrainingArguments or MemoryArguments field, dtype, attn_implementation, task, packed, padded, "
        "lora.KEY, quantization.KEY, model.KEY (a field of config.json; estimate and advise), or deepspeed (a "
        "shipped JSON's name, or a file). For images: images, image_size (1280x720). For videos: "
        "max_frames, frame_size (640x360). For both: max_pixels_per_frame, "
        "answer_tokens, freeze_vision, freeze_projector. Repeat it for several.",
    ),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="N", help="Tokens to train on, to predict the time: 10M, 2.5B.")
]
Epochs = Annotated[
    float | None,
    typer.Option("--epochs", callback=positive, help="Instead: passes over --samples, each as long as --seq-len."),
]
Samples = Annotated[str | None, typer.Option("--samples", metavar="N", help="Samples of the data set: 5000, 52k.")]


def answer_for(stack: list[str] | None) -> None:
    """Have this process's answers be for a stack (--stack), and say which version predicts.

    Raises:
        InputError: it is not written package==version, or is older than what was tried.
    """
    from hf_memopt.stack.versions import name_stack

    for sentence in name_stack(stack or []):
        print(f"note: {sentence}", file=sys.stderr)


Stack = Annotated[
    list[str] | None,
    typer.Option(
        "--stack",
        metavar="PACKAGE==VERSION",
        help="What you train with, where that is another environment: settings are written for it. Repeat it for "
        "several.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option("--price", callback=positive, help="Price of one device for an hour, to predict the cost."),
]
Plot = Annotated[str | None, typer.Option(metavar="FILE.png|.html", help="Draw memory over the steps.")]
