"""What setup.cfg asks for was tried: every requirement is bounded, and what the tests pass with lies inside."""

import configparser

from conftest import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

UPPER, LOWER = {"<", "<=", "==", "~="}, {">=", "==", "~="}


def requirements() -> list[Requirement]:
    """Of the package and all of its extras."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    found = [Requirement(line) for lines in listed for line in lines.split("\n") if line.strip()]
    return [one for one in found if canonicalize_name(one.name) != "hf-memopt"]  # `all` names the other extras


def test_all_names_every_extra_that_any_machine_takes():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    (everything,) = [Requirement(line) for line in extras["all"].split("\n") if line.strip()]
    assert everything.extras == set(extras) - {"all", "dev", "docs", "gpu"}


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_requirement_has_both_bounds(subtests):
    for requirement in requirements():
        with subtests.test(requirement=requirement):
            operators = {part.operator for part in requirement.specifier}
            assert operators & UPPER, f"setup.cfg: {requirement} takes versions that nobody tried"
            assert operators & LOWER, f"setup.cfg: {requirement} takes versions that nobody tried"


# Of a GPU's own, which is not installed where the tests run.
UNPINNED = {"flash-attn", "liger-kernel", "kernels"}


def test_every_pin_lies_inside_its_bounds():
    pinned = pins()
    asked = {canonicalize_name(requirement.name) for requirement in requirements()}
    assert asked - pinned.keys() == UNPINNED
    for requirement in requirements():
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is None or version in requirement.specifier, f"constraints.txt: {version} is not {requirement}"


def test_pins_of_one_package_are_not_repeated():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == len(pins())
