"""How far `plan --quick` is off: python benchmarks/quick_plans.py

Nothing here is measured on a device: of every setting that a quick plan proposes, its sketch is compared with its
estimate. The questions are those of questions.json that plan for whole models on each device, and further ones;
`planned` is the method of the plan with estimates, where that file has it.
"""

import json
import os
import shlex
import sys
from dataclasses import replace

from questions import QUESTIONS
from record import RESULTS, record

NAMES = (
    *("8B on a 3060", "8B on a 4090", "14B on a 5090", "8B on Colab", "8B on an M2", "32B at 8192 tokens"),
    *("70B on an MI300X", "30B A3B", "10M tokens"),
)
FURTHER = (
    "plan llama-3.2-1b --hardware rtx_3080 --method full --seq-len 512",
    "plan llama-3.2-1b --hardware rtx_4090 --method full --seq-len 1024",
    "plan qwen3-0.6b --hardware a100_80gbx2 --method lora --seq-len 1024",
    "plan qwen3-0.6b --hardware rtx_4090 --method lora --task dpo --seq-len 512",
    "plan gemma-3-4b --hardware l40s --method lora --seq-len 2048",
    "plan t5-3b --hardware rtx_3090 --method lora",
)


def quick_plan(command: str):
    """The quick plan of a command."""
    from hf_memopt.planner.plan import plan

    _, model, *options = shlex.split(command)
    names = [name.removeprefix("--").replace("-", "_") for name in options[::2]]
    settings = dict(zip(names, options[1::2], strict=True))
    for name, unit in {"seq_len": 1, "host_memory": 2**30}.items():
        if name in settings:
            settings[name] = int(settings[name]) * unit
    settings = {name: value for name, value in settings.items() if name not in ("tokens", "price")}
    return plan(model, quick=True, **settings)


def rows_of(question: str, command: str, planned: str | None) -> list[dict]:
    """A row for every setting that a quick plan proposes; one without figures where nothing fits."""
    from hf_memopt.estimator.api import estimate_jobs
    from hf_memopt.planner.choice_jobs import choice_job

    quick = quick_plan(command)
    first = {"question": question, "command": f"hf-memopt {command} --quick"}
    first |= {"method": quick.spec.preset.method if quick.profiles else None, "planned": planned}
    if not quick.profiles:
        return [first]
    profiles = list({profile.choice: profile for profile in quick}.values())
    spec = replace(quick.spec, quick=False)
    rows = []
    estimates = estimate_jobs([choice_job(spec, profile.choice) for profile in profiles])
    for profile, estimate in zip(profiles, estimates, strict=True):
        sketch = profile.estimate
        row = first | {"profile": profile.name, "settings": profile.summary, "capacity_bytes": spec.memory}
        for name in ("device_bytes", "host_bytes", "tokens_per_second"):
            row[name] = getattr(sketch, name)
            row[f"estimated_{name}"] = getattr(estimate, name)
        row["memory_error"] = round(sketch.device_bytes / estimate.device_bytes - 1, 4)
        row["fits_share"] = estimate.device_bytes <= profile.share * spec.memory
        if sketch.tokens_per_second and estimate.tokens_per_second:
            row["speed_error"] = round(sketch.tokens_per_second / estimate.tokens_per_second - 1, 4)
        rows.append(row)
    return rows


def main() -> None:
    os.environ["HF_MEMOPT_CALIBRATION"] = "off"  # the documentation's cards, not this machine's
    recorded = json.loads((RESULTS / "questions.json").read_text(encoding="utf-8"))["rows"]
    planned = {row["question"]: row["method"] for row in recorded if row.get("profiles")}
    rows = []
    for question, command in [(name, QUESTIONS[name]) for name in NAMES] + [(None, command) for command in FURTHER]:
        rows += rows_of(question or command, command, planned.get(question))
        print(rows[-1], file=sys.stderr, flush=True)
    record("quick_plans", rows)


if __name__ == "__main__":
    main()
