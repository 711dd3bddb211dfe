"""Packages that only some commands need: named before any work starts, not in a traceback after it."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from hf_memopt.errors import InputError

# Package, as it is imported -> the extra of setup.cfg that installs it, in a version that was tried.
EXTRAS = {
    "PIL": "video",
    "av": "video",
    "datasets": "train",
    "deepspeed": "deepspeed",
    "gradio": "ui",
    "matplotlib": "reports",
    "torchao": "fp8",
    "torchvision": "video",
    "trl": "trl",
}
# Where pip gets hf_memopt from, beside a clone ("."): no index has it. Once it has an address, that goes here, as
# git+https://…, and what tests/planner/test_packages.py then finds in README, docs and notebooks follows.
SOURCE = "./hf_memopt-0.1.0-py3-none-any.whl"
# What recipes need beside datasets and matplotlib.
_OF_RECIPES = {"sft": "trl", "dpo": "trl", "grpo": "trl", "video_sft": "av"}
# Where PyPI has another name.
_ON_PYPI = {"PIL": "pillow", "optimi": "torch-optimi"}


def is_installed(package: str) -> bool:
    """True if a package can be found; it is not imported."""
    return importlib.util.find_spec(package) is not None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed: hf_memopt runs from a checkout, too."""
    versions = {}
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def how_to_install(package: str, extra: str | None = None) -> str:
    """A command for a package that works in every installation: what its extra asks for; else its own name."""
    if package == "deepspeed" and sys.platform != "linux":
        return "it is for Linux alone"  # setup.cfg asks for it nowhere else
    with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout on PYTHONPATH does not know its extras
        if extra := extra or EXTRAS.get(package):
            return " ".join(["pip install", *dict.fromkeys(f"'{each}'" for each in _requirements(extra))])
    return f"pip install {_ON_PYPI.get(package, package.replace('_', '-'))}"


def _requirements(extras: str) -> Iterator[str]:
    """The requirements of extras, with commas between them, on this machine."""
    from packaging.requirements import Requirement

    for extra in extras.split(","):
        for line in metadata.requires("hf_memopt") or ():
            requirement = Requirement(line)
            if requirement.marker is None or not requirement.marker.evaluate({"extra": extra}):
                continue
            if requirement.name.replace("-", "_") == "hf_memopt":
                yield from _requirements(",".join(sorted(requirement.extras)))
            elif not requirement.marker.evaluate({"extra": ""}):
                yield f"{requirement.name}{requirement.specifier}"


def extras_for(recipe: str, strategy: str) -> str:
    """The extras of setup.cfg that a recipe needs under an engine, with commas between them."""
    extras = [EXTRAS[_OF_RECIPES[recipe]] if recipe in _OF_RECIPES else "train"]
    return ",".join([*extras, *(["deepspeed"] if strategy.startswith("zero") else [])])


def missing_for(recipe: str, strategy: str) -> str | None:
    """A note where a recipe would not start on this machine; None where nothing is missing."""
    needed = ["datasets", "matplotlib", _OF_RECIPES.get(recipe), "deepspeed" if strategy.startswith("zero") else None]
    missing = [name for name in needed if name and not is_installed(name)]
    if not missing:
        return None
    fix = how_to_install(missing[0], extras_for(recipe, strategy))
    return f"recipes/{recipe}.py needs {_not_installed(missing)} here: {fix}"


def require(packages: str | tuple[str, ...], needed_by: str, extra: str | None = None) -> None:
    """Refuse what needs a missing package.

    Args:
        packages: by the names with which they are imported.
        needed_by: the setting or command, as the user wrote it.
        extra: installs all of the packages; by default the first missing one's own.

    Raises:
        InputError: a package is not installed.
    """
    names = (packages,) if isinstance(packages, str) else packages
    if missing := [name for name in names if not is_installed(name)]:
        raise InputError(f"{needed_by} needs {_not_installed(missing)}: {how_to_install(missing[0], extra)}")


def _not_installed(packages: list[str]) -> str:
    names = " and ".join(_ON_PYPI.get(name, name) for name in packages)
    return f"{names}, which {'is' if len(packages) == 1 else 'are'} not installed"
