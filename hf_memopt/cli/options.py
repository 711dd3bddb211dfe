"""Options that several commands take, of app.py and of packages above the core, and what a shell completes."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer


def at_least_one(value: int | None) -> int | None:
    """A number of tokens, samples or devices, unchanged.

    Raises:
        typer.BadParameter: it is less than 1, or too large for a size in a tensor's shape.
    """
    if value is not None and not 1 <= value < 2**31:
        raise typer.BadParameter(f"{value} must be at least 1{', and below 2147483648' if value > 0 else ''}")
    return value


def preset_names(incomplete: str) -> list[str]:
    """Preset names that begin so, for the shell's completion."""
    from hf_memopt.presets import list_presets

    return [name for name in ["auto", *list_presets()] if name.startswith(incomplete)]


def method_names(incomplete: str) -> list[str]:
    from hf_memopt.presets import METHODS

    return [name for name in METHODS if name.startswith(incomplete)]


def model_names(incomplete: str) -> list[str]:
    """Bundled architectures that begin so."""
    folder = Path(__file__).parents[1] / "estimator" / "architectures"  # asking the estimator would import torch
    return sorted(file.stem for file in folder.glob("*.json") if file.stem.startswith(incomplete))


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
    if value is None or value == "max":
        return value
    if not value.lstrip("-").isdecimal():
        raise typer.BadParameter(f"{value!r} is neither a number of tokens nor max")
    return at_least_one(int(value))


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
    int,
    typer.Option(
        "--sequence-parallel",
        callback=at_least_one,
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
        "shipped JSON's name, or a file). For videos: max_frames, frame_size (640x360), max_pixels_per_frame, "
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
Plot = Annotated[str | None, typer.Option(metavar="FILE.png", help="Draw memory over the step into a picture.")]
