"""The package as people install it: quick to import, and whole in a wheel."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, run

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "peft", "bitsandbytes")


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


def test_the_documentations_tables_are_the_measured_ones(monkeypatch):
    """`make docs` was run after the benchmarks."""
    import runpy

    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    for name in ("levers", "plans", "clusters"):
        made = runpy.run_path(str(ROOT / "benchmarks" / f"{name}_docs.py"))
        assert made["page"]() == (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_what_the_readme_says_of_plans():
    """How long they took, as recorded."""
    import json

    rows = json.loads((ROOT / "benchmarks" / "results" / "plans.json").read_text())["rows"]
    seconds = [row["seconds"] for row in rows if row["table"] == "plan"]
    told = f"took {min(seconds):.0f} to {max(seconds):.0f} seconds each on two cores"
    assert told in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_the_figures_of_videos_are_the_measured_ones():
    """What docs/video.md says of memory and of cards stands in the results."""
    import json

    page = (ROOT / "docs" / "video.md").read_text(encoding="utf-8")
    results = ROOT / "benchmarks" / "results"
    families = json.loads((results / "video.json").read_text())["rows"]
    measures = {
        "vision out of autograd": "tower out of autograd",
        "answer-only logits": "logits of answers alone",
        "both": "both, as the recipe trains",
    }
    for measure, told in measures.items():
        shares = [family["measures"][measure]["of_plain"] for family in families.values()]
        cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
        assert f"| {told} | {cells} |" in page
    for family in families.values():
        assert all(abs(row["error"]) < 0.001 for row in family["by_frames"].values())
        assert family["measures"]["both"]["losses"] == family["measures"]["plain Trainer"]["losses"]
        assert (
            3 * family["measures"]["both"]["measured_bytes"] <= family["measures"]["plain Trainer"]["measured_bytes"]
        )
    fits = json.loads((results / "video_tiers.json").read_text())["rows"]
    for card in ("rtx_3070", "rtx_4080", "rtx_4090"):
        cells = " | ".join(str(row["max_frames"] or "none") for row in fits if row["card"] == card)
        assert f"(`{card}`) | {cells} |" in page


def test_unknown_attribute_is_an_attribute_error():
    import hf_memopt

    with pytest.raises(AttributeError, match="no_such_thing"):
        hf_memopt.no_such_thing  # noqa: B018


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A virtual environment with the built wheel; it borrows the dependencies, not the checkout, of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-q")
    source = folder / "source"
    subprocess.run(["git", "clone", "-q", ROOT, source], check=True)
    files = run("git", "ls-files", "-co", "--exclude-standard").stdout.split()
    for name in files:  # the working tree, committed or not, without what git ignores
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("hf_memopt-*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    done = run(*pip, "--python", folder / "venv" / "bin" / "python", "install", "--no-deps", wheel)
    assert done.returncode == 0, done.stderr
    # A plain path line: the .pth files in that folder, the checkout's among them, are not followed.
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    (site / "borrowed.pth").write_text(packages + "\n")
    return folder / "venv" / "bin"


def test_wheel_works_from_any_folder(installed, tmp_path):
    done = run(
        installed / "hf-memopt", "export", "a100_80gb_x8", tmp_path / "run", "--recipe", "pretrain", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    script = (tmp_path / "run" / "launch.sh").read_text()
    recipe = next(word for word in script.split() if word.endswith("/pretrain.py"))
    assert recipe.startswith(str(installed.parent)), "the recipe comes from the wheel, not from the checkout"
    dry = run(
        installed / "python", recipe, "--preset", "cpu", "--dry_run", "--output_dir", tmp_path / "out", cwd=tmp_path
    )
    assert dry.returncode == 0, dry.stderr
    assert "nothing was written" in dry.stdout
    assert not (tmp_path / "out").exists()


def test_wheel_holds_every_shipped_file(installed):
    (package,) = installed.parent.glob("lib/python*/site-packages/hf_memopt")
    code = {path.relative_to(ROOT / "hf_memopt") for path in (ROOT / "hf_memopt").rglob("*")
            if path.suffix in (".py", ".json", ".html")}  # fmt: skip
    assert not code - {path.relative_to(package) for path in package.rglob("*")}
    for folder in ("accelerate_configs", "recipes"):
        shipped = {path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.suffix in
                   (".yaml", ".json", ".py")}  # fmt: skip
        found = {path.relative_to(package / folder) for path in (package / folder).rglob("*") if path.suffix in
                 (".yaml", ".json", ".py")}  # fmt: skip
        assert found == shipped
