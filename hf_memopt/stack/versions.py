"""Versions of other libraries: those that are installed, and the range that was tried."""

import functools
from importlib import metadata

# Package -> the oldest and the newest version that were tried (benchmarks/stacks.py; docs/versions.md has what each
# lacks). Older ones are refused by pip, newer ones run, and doctor says so.
TRIED = {
    "torch": ("2.9.0", "2.14.1"),
    "transformers": ("4.57.0", "5.24.0"),
    "accelerate": ("1.10.0", "1.15.0"),
    "peft": ("0.18.0", "0.21.2"),
    "bitsandbytes": ("0.48.0", "0.50.2"),
    "datasets": ("4.0.0", "5.2.0"),
    "deepspeed": ("0.18.0", "0.19.8"),
    "trl": ("0.26.0", "1.16.0"),
}
# The first versions of transformers with keys of activation_checkpointing_kwargs.
EVERY_N_LAYERS = "5.16"
OFFLOADED_INPUTS = "5.17"  # offload


@functools.cache
def installed(package: str) -> tuple[int, ...] | None:
    """The installed release of a package, as numbers; None where it is not installed.

    Metadata are read, the package is not imported; a development version counts as its release.
    """
    from packaging.version import Version

    try:
        return Version(metadata.version(package)).release
    except metadata.PackageNotFoundError:
        return None


def has(package: str, since: str) -> bool:
    """True if the installed package is a version or newer; a package that is missing has everything."""
    release = installed(package)
    return release is None or release >= tuple(int(number) for number in since.split("."))


def beyond_tried() -> list[str]:
    """A sentence for each installed package that is newer than what was tried."""
    sentences = []
    for package, (_, newest) in TRIED.items():
        release = installed(package)
        if release is not None and release > tuple(int(number) for number in newest.split(".")):
            version = metadata.version(package)
            sentences.append(f"{package} {version} is newer than {newest}, the newest version tried: it may differ")
    return sentences
