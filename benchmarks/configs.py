"""Read all that other tools' repositories ship, and compare the memory that they state with ours:
python benchmarks/configs.py FOLDER

FOLDER holds checkouts, one a repository, each in a folder named owner+name. Every YAML and shell script under its
folders of examples is read, or refused in one sentence; nothing is run, imported or copied. Stated figures come from
comments of ms-swift's scripts and from data/configs.toml. Files are halves by a hash of their path: one half of the
figures (held_out) was not looked at while the tables were written.
"""

import argparse
import hashlib
import logging
import re
import tomllib
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

from record import record

DATA = Path(__file__).parent / "data" / "configs.toml"
# Repository -> the folders with its configurations, and what their files end in.
REPOSITORIES = {
    "axolotl-ai-cloud/axolotl": (("examples",), (".yml", ".yaml")),
    "hiyouga/LLaMA-Factory": (("examples",), (".yaml",)),
    "modelscope/ms-swift": (("examples",), (".sh", ".yaml")),
    "pytorch/torchtune": (("recipes/configs",), (".yaml",)),
    "huggingface/alignment-handbook": (("recipes",), (".yaml",)),
    "huggingface/open-r1": (("recipes",), (".yaml", ".slurm")),
}
_NO_JOB = ("is no configuration of a training job", "no command here trains", "holds no settings")
# 2 * 30GiB, 18GiB * 2, 24GB: the first comment that states memory.
_STATED = re.compile(r"^\s*#\D*?(?:\d+\s*[*×]\s*)?(\d+(?:\.\d+)?)\s*G(?:i?B)?\b(?!.*(?:Ascend|A3))", re.MULTILINE)
_CARD = 79  # so many GiB and more are the size of a card, not what was used of it
GIB = 2**30


def held_out(repository: str, file: str) -> bool:
    """True if a file's figure was not looked at while the tables were written."""
    return repository == "modelscope/ms-swift" and int(hashlib.sha256(file.encode()).hexdigest()[0], 16) % 2 == 1


def read(path: Path) -> tuple[str, str]:
    """What becomes of a file: read, refused, no job, not known or failed; and the sentence."""
    from hf_memopt.errors import InputError
    from hf_memopt.foreign.source import read_source

    try:
        translation = read_source(str(path)).translate()
        if translation.unknown and not translation.refused:
            return "not known", str(translation.unknown[0].key)
        translation.check()
        translation.spec()
        return "read", ""
    except InputError as error:
        text = str(error).replace(str(path), "FILE")
        return ("no job" if any(words in text for words in _NO_JOB) else "refused"), text
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"


def counted(folder: Path) -> list[dict]:
    """The counts of each repository, and the sentences of what is not read."""
    rows = []
    for repository, (places, endings) in REPOSITORIES.items():
        root = folder / repository.replace("/", "+")
        paths = [path for place in places for path in sorted((root / place).rglob("*")) if path.suffix in endings]
        found = [read(path) for path in paths if path.is_file()]
        kinds = Counter(kind for kind, _ in found)
        sentences = Counter(_brief(text) for kind, text in found if kind in ("refused", "not known", "failed"))
        counts = {kind: kinds[kind] for kind in ("read", "refused", "no job", "not known", "failed")}
        rows.append({"repository": repository, "files": len(found), **counts, "sentences": sentences.most_common(8)})
        print(rows[-1], flush=True)
    return rows


def _brief(text: str) -> str:
    """A sentence without the file's own values."""
    return re.sub(r"=[^:]*:", ":", text.split(" (")[0])[:120]


def figures(folder: Path) -> list[dict]:
    """The figures that can be compared: of files that are read, of bundled models, with a length."""
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    stated = data["figure"]
    root = folder / "modelscope+ms-swift"
    for path in sorted((root / "examples").rglob("*.sh")):
        match = _STATED.search(path.read_text(encoding="utf-8"))
        if match and float(match[1]) < _CARD:
            file = str(path.relative_to(root))
            row = {"repository": "modelscope/ms-swift", "where": file, "file": file}
            stated.append(row | {"stated": float(match[1]), "metric": "device"})
    rows = []
    for row in stated:
        if (compared := _compared(folder, row)) is not None:
            rows.append(compared | {"why": data["why"].get(row["where"], "")})
            print(compared, flush=True)
    return rows


def _compared(folder: Path, row: dict) -> dict | None:
    """A figure with ours; None of a file that is refused, names no bundled model or no length."""
    from hf_memopt.cli.estimate import settle_job
    from hf_memopt.errors import InputError
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.architectures import is_bundled_id
    from hf_memopt.estimator.spec_job import spec_job
    from hf_memopt.foreign.source import read_source

    path = folder / row["repository"].replace("/", "+") / row["file"]
    try:
        source = read_source(str(path))
        source = replace(source, settings=_overridden(source.settings, row.get("override", {})))
        translation = source.translate()
        translation.check()
        spec = translation.spec()
        if spec.seq_len is None or not is_bundled_id(str(spec.model)):
            return None
        hardware, devices = row.get("hardware", "a100_80gb"), row.get("devices", spec.world_size)
        estimate = estimate_job(spec_job(settle_job(replace(spec, hardware=hardware, world_size=devices))))
    except InputError as error:
        print(row["where"], error, flush=True)
        return None
    ours = {"device": "device_bytes", "reserved": "peak_reserved_bytes", "allocated": "peak_allocated_bytes"}
    predicted = getattr(estimate, ours[row["metric"]]) / GIB
    facts = {"model": str(spec.model), "method": spec.method, "seq_len": spec.seq_len, "devices": devices or 1}
    kept = {key: row[key] for key in ("repository", "where", "file", "stated", "metric")}
    more = {"predicted": round(predicted, 2), "error": round(predicted / row["stated"] - 1, 4)}
    return kept | facts | more | {"held_out": held_out(row["repository"], row["file"])}


def _overridden(settings, override: dict) -> dict:
    """Settings with others over them, whose keys are dotted."""
    result = {key: dict(value) if isinstance(value, dict) else value for key, value in settings.items()}
    for key, value in override.items():
        *parents, name = key.split(".")
        place = result
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    record(
        "configs", figures(arguments.folder), "python benchmarks/configs.py FOLDER", counts=counted(arguments.folder)
    )
