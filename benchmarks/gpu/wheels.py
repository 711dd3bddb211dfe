"""Wheels that a machine with a card and without network may lack: make gpu-wheels, or this module with a folder.

Each is the version of constraints.txt; hf_memopt's own is of this checkout. torch is never among them: the machine's
own build fits its driver. With --cuda bitsandbytes' wheel keeps the library of one version of CUDA, a tenth of its
size. What does not fit under the limit any more is named, and so is what cannot be had as a wheel.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.gpu.case import ROOT

MIB = 2**20
# Most needed first: without the first line nothing runs; the last ones are large, or of one part alone.
PACKAGES = "transformers accelerate peft huggingface_hub tokenizers safetensors psutil PyYAML nvidia-ml-py rich typer"
PACKAGES += " Jinja2 datasets dill multiprocess xxhash httpx2 httpcore2 truststore regex pytest bitsandbytes"
PLATFORMS = [f"manylinux_2_{minor}_{{machine}}" for minor in (39, 35, 34, 31, 28, 27, 24, 17)]
PLATFORMS += ["manylinux2014_{machine}", "manylinux1_{machine}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.wheels", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python-version", default="3.12")
    parser.add_argument("--machine", default="x86_64")
    parser.add_argument("--limit", type=float, default=64.0, help="MiB in all; the repository may count, too")
    parser.add_argument("--without", default="", help="comma-separated packages that the machine has")
    parser.add_argument("--cuda", help="of the machine's torch, such as 13.0")
    parser.add_argument("--list", action="store_true", help="say what would be downloaded, and download nothing")
    args = parser.parse_args()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    wanted = [name for name in PACKAGES.split() if name.lower() not in args.without.lower().split(",")]
    if args.list:
        print("\n".join(f"{name}=={pins[name]}" for name in wanted))
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    own = [sys.executable, "-m", "pip", "wheel", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*own, "-w", str(args.folder), str(ROOT)], check=True)
    left_out = [line for name in wanted if (line := fetch(args, f"{name}=={pins[name]}"))]
    print(
        f"{size(args.folder) / MIB:.1f} MiB in {args.folder}; on the machine: python3 -m pip install --no-index "
        f"--no-deps --target /tmp/site {args.folder}/*.whl"
    )
    for line in left_out:
        print(f"left out: {line}")
    return 0


def fetch(args: argparse.Namespace, pinned: str) -> str:
    """Download one wheel; why it was left out, "" where it was not."""
    before = set(args.folder.glob("*.whl"))
    words = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    words += ["--only-binary=:all:", "--implementation", "cp", "--python-version", args.python_version]
    words += ["-d", str(args.folder)]
    for platform in PLATFORMS:
        words += ["--platform", platform.format(machine=args.machine)]
    done = subprocess.run([*words, pinned], capture_output=True, text=True)
    if done.returncode:
        return f"{pinned}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}"
    found = set(args.folder.glob("*.whl")) - before
    for path in found:
        if args.cuda and path.name.startswith("bitsandbytes-"):
            keep_one_library(path, f"cuda{args.cuda.replace('.', '')}")
    if size(args.folder) <= args.limit * MIB:
        return ""
    for path in found:
        taken = path.stat().st_size / MIB
        path.unlink()
        return f"{pinned}: its {taken:.1f} MiB go beyond {args.limit:g} MiB in all"
    return f"{pinned}: the folder already has more than {args.limit:g} MiB"


def keep_one_library(wheel: Path, device: str) -> None:
    """Drop the libraries of all devices but the CPU and one, such as cuda130. pip does not miss them."""
    smaller, pattern = wheel.with_suffix(".smaller"), r"bitsandbytes/libbitsandbytes_(\w+)\.so"
    with zipfile.ZipFile(wheel) as old:
        found = [match[1] for name in old.namelist() if (match := re.fullmatch(pattern, name))]
    if device not in found:
        raise SystemExit(f"error: --cuda: bitsandbytes has {', '.join(found)}, and not {device}")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            library = re.fullmatch(pattern, item.filename)
            if library is None or library[1] in ("cpu", device):
                new.writestr(item, old.read(item))
    smaller.replace(wheel)


def size(folder: Path) -> int:
    """Bytes of the wheels in a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.whl"))


if __name__ == "__main__":
    sys.exit(main())
