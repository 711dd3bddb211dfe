"""Questions that people ask before they train, each answered by one command: python benchmarks/questions.py [NAME …]

Nothing here is measured: the answers are plans, and docs/plans.md is made from them. With names, only those questions
are asked again, and the other rows of the file stay. "lengths": the longest sequences that fit cards of three sizes.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from record import RESULTS, record

PRICED = Path(__file__).parent / "data" / "questions"  # the folder of prices.toml, in which all commands run
TOKENS = 10**7  # whose hours are shown


# What somebody asks -> the command that answers it.
QUESTIONS = {
    "8B on a 3060": "plan llama-3.1-8b --hardware rtx_3060_12gb --seq-len 2048",
    "8B on a 4090": "plan llama-3.1-8b --hardware rtx_4090 --seq-len 2048",
    "14B on a 5090": "plan qwen3-14b --hardware rtx_5090 --seq-len 2048",
    "8B on Colab": "plan llama-3.1-8b --hardware t4 --host-memory 12 --seq-len 2048",
    "8B on an M2": "plan llama-3.1-8b --hardware m2_24gb --seq-len 2048",
    "32B at 8192 tokens": "plan qwen3-32b --hardware h100_80gb --method lora --seq-len 8192",
    "70B on 2 x 3090": "plan llama-3.1-70b --hardware 2x3090 --seq-len 2048",
    "70B on 4 x L40S": "plan llama-3.1-70b --hardware l40sx4 --seq-len 2048",
    "70B on an MI300X": "plan llama-3.1-70b --hardware mi300x --seq-len 2048",
    "70B on 8 x A100": "plan llama-3.1-70b --hardware a100_80gbx8 --seq-len 4096",
    "405B": "plan llama-3.1-405b --hardware h100_80gbx64 --seq-len 4096",
    "30B A3B": "plan qwen3-30b-a3b --hardware h100_80gb --seq-len 2048",
    "video 7B": "plan qwen2.5-vl-7b --hardware rtx_4090 --method qlora --frames max",
    "cheapest card": "plan qwen3-14b --hardware any --method lora --prices prices.toml --tokens 10M --seq-len 2048",
    "10M tokens": "plan qwen3-8b --hardware a100_80gb --method lora --seq-len 2048 --tokens 10M --price 1.60",
}

LENGTHS = [
    f"plan llama-3.1-8b --hardware {card} --method {method} --seq-len max"
    for method in ("lora", "qlora")
    for card in ("rtx_4090", "l40s", "a100_80gb")
]


def ask(command: str) -> tuple[dict, float]:
    """A command's JSON, and the seconds that it took.

    Raises:
        RuntimeError: it refused.
    """
    program = [sys.executable, "-c", "from hf_memopt.cli.app import main; main()"]
    environment = os.environ | {"HF_MEMOPT_CALIBRATION": "off"}  # the documentation's cards, not this machine's
    began = time.perf_counter()
    made = subprocess.run(
        [*program, *shlex.split(command), "--json"], cwd=PRICED, env=environment, stdout=subprocess.PIPE, text=True
    )
    if made.returncode > 1:  # 1: nothing fits, which is an answer
        raise RuntimeError(f"hf-memopt {command} ended with {made.returncode}")
    return json.loads(made.stdout), time.perf_counter() - began


def answered(question: str) -> dict:
    """A question's row."""
    command = QUESTIONS[question]
    found, took = ask(command)
    keep = next(keep for name, keep in KEPT.items() if name in found)
    return {"question": question, "command": f"hf-memopt {command}", "seconds": round(took, 1)} | keep(found)


def plan_of(found: dict) -> dict:
    """Of a plan: the usual profile, all profiles in short, and what stands beside them."""
    profiles = found["profiles"]
    balanced = (profile for profile in profiles if profile["profile"] == "balanced")
    usual = next(balanced, profiles[0] if profiles else None)
    names = "model hardware devices method seq_len effective_batch_size usable_bytes usable_host_bytes"
    names += " host_memory_source missing_bytes nearest plain methods rejected notes"
    row = {name: found[name] for name in names.split()} | {"profiles": [_profile(profile) for profile in profiles]}
    if usual is None:
        return row
    took = found["durations"][usual["profile"]]
    speed = usual["tokens_per_second"]
    return row | {
        "profile": usual["profile"],
        "training_arguments": usual["training_arguments"],
        "memory_arguments": usual["memory_arguments"],
        "hours": speed and TOKENS / speed / 3600,
        "cost": took and took["cost"],
    }


def _profile(profile: dict) -> dict:
    names = ("device_bytes", "host_bytes", "phase", "breakdown", "step_seconds", "mfu", "speed_error")
    names += ("train_device_bytes",)
    estimate = {name: profile["estimate"][name] for name in names if name in profile["estimate"]}
    return {name: profile[name] for name in ("profile", "settings", "tokens_per_second")} | estimate


def cards_of(found: dict) -> dict:
    """Of a comparison of cards: all of them."""
    return {name: found[name] for name in ("model", "seq_len", "tokens", "currency", "cards", "first")}


def frames_of(found: dict) -> dict:
    """Of the most frames: a row a frame size."""
    names = ("device_bytes", "step_seconds", "breakdown", "phase")
    rows = [
        {name: row[name] for name in ("max_pixels_per_frame", "max_frames", "seq_len")}
        | {name: row["estimate"][name] for name in names}
        for row in found["frames"]
    ]
    return {"frames": rows, "capacity_bytes": found["capacity_bytes"]}


KEPT = {"profiles": plan_of, "cards": cards_of, "frames": frames_of}  # by a key that only this answer has


def lengths_of(command: str) -> list[dict]:
    """A row for each set of memory features."""
    kept = ("device_bytes", "host_bytes", "tokens_per_second")
    return [
        {"hardware": shlex.split(command)[3]}
        | {name: row[name] for name in ("method", "settings", "seq_len", "limited_by")}
        | {name: row["estimate"].get(name) for name in kept}
        for row in ask(command)[0]["lengths"]
    ]


def main(names: list[str]) -> None:
    """Ask the questions of these names, or all, and write the file after each."""
    if unknown := set(names) - {*QUESTIONS, "lengths"}:
        raise SystemExit(f"no such question: {', '.join(sorted(unknown))}")
    rows = {row["question"]: row for row in json.loads((RESULTS / "questions.json").read_text())["rows"]}
    if not names or "lengths" in names:
        record(
            "lengths",
            [row for command in LENGTHS for row in lengths_of(command)],
            "python benchmarks/questions.py lengths",
        )
    for question in [name for name in names if name != "lengths"] if names else QUESTIONS:
        print(f"hf-memopt {QUESTIONS[question]}", flush=True)
        rows[question] = answered(question)
        record("questions", [rows[name] for name in QUESTIONS if name in rows])


if __name__ == "__main__":
    main(sys.argv[1:])
