"""Versions of other libraries: those that are installed, and the range that was tried."""

import functools
import re
from importlib import metadata

from hf_memopt.errors import InputError, choose
from hf_memopt.packages import SOURCE

# Package -> the oldest and the newest version that were tried, by benchmarks/stacks.py or by hand: docs/versions.md
# has what each lacks. Older ones are refused by pip, newer ones run, and doctor says so.
TRIED = {
    "torch": ("2.9.1", "2.14.1"),
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
# The bitsandbytes whose 4-bit operators run on MPS with torch alone (its pull request 1983).
MPS_4BIT = "0.50.2"


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
    return _is_since(installed(package), since)


# What the answers are for, where that is not this environment (--stack): package -> release.
named: dict[str, tuple[int, ...]] = {}


def stack_has(package: str, since: str) -> bool:
    """has() of the stack that the answers are for."""
    return _is_since(named.get(package, installed(package)), since)


def name_stack(versions: list[str]) -> list[str]:
    """Have answers be for packages of other versions, each written package==version.

    Returns:
        A sentence for each that is not the installed one.

    Raises:
        InputError: one is written otherwise, or is older than what was tried.
    """
    sentences = []
    named.clear()  # an earlier answer's
    for text in versions:
        package, equals, version = (part.strip() for part in text.partition("=="))
        if not equals or not re.fullmatch(r"\d+(\.\d+)*", version):
            raise InputError(f"--stack {text}: write it as package==version, such as transformers==5.5")
        if package not in TRIED:
            raise choose("package of --stack", package, TRIED)
        release, oldest = _numbers(version), TRIED[package][0]
        if release < _numbers(oldest)[: len(release)]:
            raise InputError(f"--stack {text}: the oldest version that was tried is {oldest}")
        named[package], here = release, installed(package)
        if here is None or here[: len(release)] != release:
            own = "is not installed" if here is None else f"{metadata.version(package)} predicts"
            sentences.append(
                f"{package} {own}; settings are written for {version}. To predict with it: "
                f"uvx --from {SOURCE} --with '{package}=={version}' hf-memopt …"
            )
    return sentences


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in version.split("."))


def _is_since(release: tuple[int, ...] | None, since: str) -> bool:
    return release is None or release >= _numbers(since)


def beyond_tried() -> list[str]:
    """A sentence for each installed package that is newer than what was tried."""
    sentences = []
    for package, (_, newest) in TRIED.items():
        release = installed(package)
        if release is not None and release > _numbers(newest):
            version = metadata.version(package)
            sentences.append(f"{package} {version} is newer than {newest}, the newest version tried: it may differ")
    return sentences
