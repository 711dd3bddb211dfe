"""The package as people install it: quick to import, and whole in a wheel."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, flags, run

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "bitsandbytes")
WITHOUT_CHECKOUT = {"PYTHONPATH": ""}  # which may name it


@pytest.mark.parametrize(
    "code",
    [
        "import hf_memopt",
        "import hf_memopt; hf_memopt.get_preset('rtx_4090', method='qlora').settings(); hf_memopt.list_presets()",
        "import sys; sys.argv = ['hf-memopt', '--help']; from hf_memopt.cli import main; main()",
        "import sys; sys.argv = ['hf-memopt', 'presets']; from hf_memopt.cli import main; main()",
        "import sys; sys.argv = ['hf-memopt', 'show', 'h100_80gb_x8']; from hf_memopt.cli import main; main()",
    ],
)
def test_nothing_heavy_is_imported(code):
    check = f"import atexit, sys\natexit.register(lambda: print('LOADED', sorted(set({HEAVY}) & set(sys.modules))))\n"
    done = run(sys.executable, "-c", check + code)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout


def test_the_claims_of_the_video_page_hold():
    """The same losses, a third of the memory, and a close estimate."""
    import json

    families = json.loads((ROOT / "benchmarks" / "results" / "video.json").read_text())["rows"]
    for family in families.values():
        assert all(abs(row["error"]) < 0.001 for row in family["by_frames"].values())
        plain, both = family["measures"]["plain Trainer"], family["measures"]["both"]
        # Kernels round sums of other shapes differently: the last bits of float32 depend on the CPU.
        assert both["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        assert 3 * both["measured_bytes"] <= plain["measured_bytes"]


def test_type_checkers_read_the_annotations():
    """PEP 561: a marker file, which the wheel takes along."""
    from configparser import ConfigParser

    assert (ROOT / "hf_memopt" / "py.typed").is_file()
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg", encoding="utf-8")
    assert "py.typed" in settings["options.package_data"]["hf_memopt"]
    assert "Typing :: Typed" in settings["metadata"]["classifiers"]


def test_the_stub_names_what_the_package_resolves():
    """Type checkers cannot follow __getattr__: they read __init__.pyi."""
    import ast
    from importlib.metadata import entry_points

    from hf_memopt import _CONTRIBUTED, _HOME

    stub = ast.parse((ROOT / "hf_memopt" / "__init__.pyi").read_text(encoding="utf-8"))
    imported = [(node, name) for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for name in node.names]
    contributed = {entry.name: entry.module for entry in entry_points(group="hf_memopt.api")}
    assert contributed.keys() == set(_CONTRIBUTED)
    assert {name.asname: node.module for node, name in imported} == _HOME | contributed


@pytest.mark.parametrize("source", [None, "https://example.org/hf_memopt"])
def test_no_link_of_the_description_is_relative(source):
    """PyPI shows README.md far from the files that it links to."""
    import runpy

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["describe"](readme, source)
    targets = set(re.findall(r"\]\(([^)\s]+)\)", text))
    assert all(target.startswith(("https:", "http:")) for target in targets)
    assert (f"{source}/blob/main/docs/plans.md" in targets) == (f"{source}/raw/main/docs/images/plan.svg" in targets)
    assert bool(targets) == bool(source) and "docs/plans.md" in readme and "how plans are made" in text


def test_unknown_attribute_is_an_attribute_error():
    import hf_memopt

    with pytest.raises(AttributeError, match="no_such_thing"):
        hf_memopt.no_such_thing  # noqa: B018


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A virtual environment with the built wheel; it borrows the dependencies, not the checkout, of this one.

    The checkout is copied file by file: it may be an unpacked archive, or belong to somebody else, of whose
    repositories git reads nothing.
    """
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    source = folder / "source"
    shutil.copytree(
        ROOT, source, ignore=shutil.ignore_patterns(".*", "__pycache__", "out", "build", "*.egg-info", "tests")
    )
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("hf_memopt-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    done = run(
        *pip, "--python", folder / "venv" / "bin" / "python", "install", "--no-deps", wheel, env=WITHOUT_CHECKOUT
    )
    assert done.returncode == 0, done.stderr
    # A plain path line: the .pth files in that folder, the checkout's among them, are not followed.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "borrowed.pth").write_text(packages + "\n")
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_wheel_works_from_any_folder(installed, tmp_path):
    elsewhere = {"cwd": tmp_path, "env": WITHOUT_CHECKOUT}
    command = [installed / "hf-memopt", "export", "a100_80gb_x8", tmp_path / "run", *flags(recipe="pretrain")]
    done = run(*command, **elsewhere)
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "run" / "launch.sh").read_text()
    recipe = next(word for word in script.split() if word.endswith("/pretrain.py"))
    assert recipe.startswith(str(installed.parent)), "the recipe comes from the wheel, not from the checkout"
    options = flags(preset="cpu", output_dir=tmp_path / "out")
    dry = run(installed / "python", recipe, *options, "--dry_run", **elsewhere)
    assert dry.returncode == 0, dry.stderr
    assert "nothing was written" in dry.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_wheel_holds_every_shipped_file(installed):
    (package,) = installed.parent.glob("lib/python*/site-packages/hf_memopt")

    def files(folder, *suffixes):
        return {path.relative_to(folder) for path in folder.rglob("*") if path.suffix in suffixes}

    code = (".py", ".pyi", ".json", ".html", ".toml", ".typed")
    assert files(ROOT / "hf_memopt", *code) <= files(package, *code)
    for name in ("accelerate_configs", "recipes"):
        assert files(ROOT / name, ".yaml", ".json", ".py") == files(package / name, ".yaml", ".json", ".py")
