"""Read all that other tools' repositories ship, and compare the memory that they state with ours:
python benchmarks/configs.py FOLDER

FOLDER holds checkouts, one a repository, each in a folder named owner+name. Every YAML and shell script under its
folders of examples is read, or refused in one sentence; nothing is run, imported or copied. Stated figures come from
comments of ms-swift's scripts and from data/configs.toml; those of samples that are not packed into blocks of one
length are not compared. One half of the figures, by a hash of where they stand, was not looked at while the tables
were written (held_out).
"""

import argparse
import hashlib
import json
import logging
import re
import tomllib
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from record import record
from transformers import AutoConfig

from hf_memopt.cli.estimate import settle_job
from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import is_bundled_id
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.foreign.source import read_source

DATA = Path(__file__).parent / "data" / "configs.toml"
# Repository -> the folders with its configurations, and what their files end in.
REPOSITORIES = {
    "axolotl-ai-cloud/axolotl": (("examples",), (".yml", ".yaml")),
    "hiyouga/LLaMA-Factory": (("examples",), (".yaml",)),
    "modelscope/ms-swift": (("examples",), (".sh", ".yaml")),
    "pytorch/torchtune": (("recipes/configs",), (".yaml",)),
    "huggingface/alignment-handbook": (("recipes",), (".yaml",)),
    "huggingface/open-r1": (("recipes",), (".yaml", ".slurm")),
    "huggingface/trl-jobs": (("trl_jobs/configs",), (".yaml",)),
}
_NO_JOB = ("is no configuration of a training job", "no command here trains", "holds no settings")
# 2 * 30GiB, 18GiB * 2, 24GB: the first comment that states memory.
_STATED = re.compile(r"^\s*#\D*?(?:\d+\s*[*×]\s*)?(\d+(?:\.\d+)?)\s*G(?:i?B)?\b(?!.*(?:Ascend|A3))", re.MULTILINE)
_CARD = 79  # so many GiB and more are the size of a card, not what was used of it
GIB = 2**30


def held_out(row: dict) -> bool:
    """True if a figure was not looked at while the tables were written: half of them, by a hash of where it stands."""
    where = row["where"] if "looked_at" not in row else ""
    return bool(where) and int(hashlib.sha256(where.encode()).hexdigest()[0], 16) % 2 == 1


def read(path: Path) -> tuple[str, str]:
    """What becomes of a file: read, refused, no job, not known or failed; and the sentence."""
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


def figures(folder: Path, seen_alone: bool) -> tuple[list[dict], list[dict]]:
    """The figures that can be compared, with ours; and the others, with the reason.

    Args:
        seen_alone: leave out the half that is held out.
    """
    data = tomllib.loads(DATA.read_text(encoding="utf-8"))
    rows, others = [], []
    for row in data["figure"] + list(_commented(folder / "modelscope+ms-swift")):
        if seen_alone and held_out(row):
            continue
        try:
            compared = _compared(folder, row, data["models"]) | {"why": data["why"].get(row["where"], "")}
            rows.append(compared)
            print(compared, flush=True)
        except InputError as error:
            others.append({key: row[key] for key in ("repository", "where", "stated")} | {"why": str(error)})
            print(others[-1], flush=True)
    return rows, others


def _commented(root: Path) -> Iterator[dict]:
    """The memory that comments of ms-swift's scripts state, but for cards of their size."""
    for path in sorted((root / "examples").rglob("*.sh")):
        match = _STATED.search(path.read_text(encoding="utf-8"))
        if match and float(match[1]) < _CARD:
            file = str(path.relative_to(root))
            row = {"repository": "modelscope/ms-swift", "where": file, "file": file}
            yield row | {"stated": float(match[1]), "metric": "device"}


def _compared(folder: Path, row: dict, models: dict) -> dict:
    """A figure with ours.

    Raises:
        InputError: the job is refused, its model's sizes are not known, or the lengths of its samples.
    """
    if "unstated" in row:
        raise InputError(f"not stated: {row['unstated']}")
    source = read_source(str(folder / row["repository"].replace("/", "+") / row["file"]))
    translation = replace(source, settings=_overridden(source.settings, row.get("override", {}))).translate()
    translation.check()
    spec = translation.spec(devices=row.get("devices"))
    if not (spec.packed or spec.training.get("packing")):
        raise InputError("the lengths of its samples are not stated")
    hardware, devices = row.get("hardware", "a100_80gb"), row.get("devices", spec.world_size)
    spec = replace(spec, model=_model(str(spec.model), models), hardware=hardware, world_size=devices)
    estimate = estimate_job(spec_job(settle_job(spec)))
    ours = {"device": "device_bytes", "reserved": "peak_reserved_bytes", "allocated": "peak_allocated_bytes"}
    predicted = getattr(estimate, ours[row["metric"]]) / GIB
    facts = {"model": str(translation.fields["model"]), "method": spec.method, "seq_len": spec.seq_len}
    kept = {key: row[key] for key in ("repository", "where", "stated", "metric")}
    facts |= {"devices": devices or 1, "predicted": round(predicted, 2)}
    return kept | facts | {"error": round(predicted / row["stated"] - 1, 4)} | {"held_out": held_out(row)}


def _model(name: str, models: dict):
    """A bundled model by its name, or another's configuration.

    Raises:
        InputError: its sizes are not known.
    """
    known = models.get(name, name)
    if isinstance(known, str) and not is_bundled_id(known):
        raise InputError("its model is not bundled")
    return known if isinstance(known, str) else AutoConfig.for_model(**json.loads(json.dumps(known)))


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
    parser.add_argument("--seen", action="store_true", help="print the figures that are not held out, and record none")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    compared, others = figures(arguments.folder, arguments.seen)
    if not arguments.seen:
        counts = counted(arguments.folder)
        record("configs", compared, "python benchmarks/configs.py FOLDER", counts=counts, not_compared=others)
