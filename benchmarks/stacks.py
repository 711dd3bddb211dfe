"""hf_memopt on the libraries that people have: python benchmarks/stacks.py FOLDER [NAME …] [--again]

Makes an environment in FOLDER for each entry of data/stacks.toml, installs the package into it, runs stack_checks.py
with its Python, records the outcome in results/stacks.json and deletes the environment. What is recorded is not run
again without --again. Needs uv, which reads UV_FIND_LINKS and UV_INDEX_URL where wheels lie elsewhere than on PyPI.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from record import RESULTS, record

ROOT = Path(__file__).resolve().parents[1]
STACKS = tomllib.loads((ROOT / "benchmarks" / "data" / "stacks.toml").read_text())
NEEDED = ("datasets", "matplotlib")  # of a recipe
SHOWN = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "datasets")


def main() -> None:
    """Run what is not recorded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="outside of the clone; some 2 GB for each torch")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(STACKS)}; default: all")
    parser.add_argument("--again", action="store_true", help="also what is recorded")
    options = parser.parse_args()
    if shutil.which("uv") is None:
        sys.exit("error: uv is not installed: pip install uv")
    if unknown := set(options.names) - STACKS.keys():
        sys.exit(f"error: no such environment: {', '.join(unknown)}; there are {', '.join(STACKS)}")
    done = {row["name"]: row for row in recorded()}
    names, failed = options.names or list(STACKS), []
    for number, name in enumerate(names, 1):
        if name in done and done[name]["asked"] == STACKS[name] and not options.again:
            continue
        print(f"{number} of {len(names)}: {name}", flush=True)
        done[name] = run(name, options.folder / name.replace(" ", "-"))
        record("stacks", [done[name] for name in STACKS if name in done], "make stacks")
        failed += [f"{name}: {row['check']}" for row in done[name]["checks"] if row["result"] == "failed"]
    if failed:
        sys.exit("\n".join(["failed:", *failed]))


def recorded() -> list[dict]:
    path = RESULTS / "stacks.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def run(name: str, folder: Path) -> dict:
    """Make an environment, check it, delete it."""
    try:
        asked = [f"{package}=={version}" for package, version in STACKS[name].items()]
        python = make(folder, asked)
        before = versions(python)
        install(python, str(ROOT))
        after = versions(python)
        replaced = {package: (old, after[package]) for package, old in before.items() if after[package] != old}
        changes = [f"{package} {old} -> {new}" for package, (old, new) in replaced.items()]
        checks = [{"check": "install", "result": "failed" if changes else "works", "says": ", ".join(changes)}]
        checks += check(python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    shown = {package: after[package] for package in SHOWN if package in after}
    return {"name": name, "asked": STACKS[name], "versions": shown, "checks": checks}


def make(folder: Path, packages: list[str]) -> Path:
    """A new environment's Python."""
    subprocess.run(["uv", "venv", "-q", "--clear", "-p", sys.executable, str(folder)], check=True)
    python = folder / "bin" / "python"
    install(python, *packages, *NEEDED)
    return python


def install(python: Path, *packages: str) -> None:
    subprocess.run(["uv", "pip", "install", "-q", "--python", str(python), *packages], check=True)


def versions(python: Path) -> dict[str, str]:
    """What is installed: package -> version."""
    frozen = subprocess.run(["uv", "pip", "list", "-q", "--format=json", "--python", str(python)], capture_output=True)
    return {row["name"]: row["version"] for row in json.loads(frozen.stdout)}


def check(python: Path) -> list[dict]:
    """The lines of stack_checks.py; one more where it ended before its end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    checks = []
    with tempfile.TemporaryFile("w+") as errors:
        argv = [str(python), str(ROOT / "benchmarks" / "stack_checks.py")]
        more = {"cwd": python.parent, "env": environment, "stderr": errors}
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **more) as program:
            for line in program.stdout:
                if line.startswith('{"check"'):
                    checks.append(json.loads(line))
                    row = checks[-1]
                    print(f"  {row['check']}: {row['result']} {row.get('says', '')[:150]}", flush=True)
        if program.returncode:
            errors.seek(0)
            checks.append({"check": "all", "result": "failed", "says": errors.read()[-1500:]})
    return checks


if __name__ == "__main__":
    main()
