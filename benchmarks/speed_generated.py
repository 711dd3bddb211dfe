"""Predicted steps of GRPO against published ones: python benchmarks/speed_generated.py

data/published_generated.json: runs of TRL, and of EasyR1, NeMo-RL and verl, whose steps are the same work. Rows of
documentation A name model, card, batch and lengths; of B more was read out of other figures (`inferred` says what, of
A too). Constants are from published decode rates, and no row changed any. To those of A whose id has a SHA-256 that 3
divides none may be fitted, either (held_back), nor to B. A row's `stack` names what it has and the prediction has not:
pictures, which trainers that generate are refused for, or other kernels. Such rows are shown apart.

A packed row trains on samples of their mean length (no padding), a TRL row on ones of the longest. Of a step with
several optimizer updates `steps_per_generation` covers all of them. Nothing here was measured by this project.
"""

import dataclasses
import hashlib
import json
import math
import statistics
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

from jobs import CHECKPOINTED, four_bits, lora
from record import record

DATA = Path(__file__).parent / "data" / "published_generated.json"
NEAR = 0.2
OPEN, HELD_BACK = "well documented", "well documented, held back"


def compare(row: dict) -> dict:
    """A row's step, as an estimate predicts it, whose kernels alone are traced here."""
    from hf_memopt.estimator.api import run_trace
    from hf_memopt.estimator.timing import generation_time
    from hf_memopt.estimator.timing.generation_time import Lengths
    from hf_memopt.estimator.timing.throughput import counted_job, throughput

    prompt, longest = row["prompt_tokens"], row["longest_completion_tokens"]
    mean = row["mean_completion_tokens"] or longest / generation_time.LONGEST
    job = described(row, prompt, mean if row["packed"] else longest)
    counted = counted_job(job)
    own = {name: row[name] for name in ("steps_per_generation", "num_generations", "beta") if name in row}
    job = dataclasses.replace(job, fields=job.fields | own)  # a reference beside a sharded model is refused otherwise
    traces = [run_trace(dataclasses.replace(counted.at_depth(depth), counted=True)) for depth in counted.depths()]
    with mock.patch.object(generation_time, "lengths_of", return_value=Lengths(prompt, mean, longest)):
        found = throughput(job, counted, counted.depths(), traces)
    seconds = row["updates"] * found.step_seconds
    generation = seconds * found.generation_share
    error = seconds / row["measured_seconds"] - 1
    of_generation = row["measured_generation_seconds"]
    shown = ("id", "source", "framework", "model", "gpu", "processes", "method", "documentation", "inferred", "stack")
    return {name: row[name] for name in shown} | {
        "held_back": is_held_back(row),
        "measured_seconds": row["measured_seconds"],
        "predicted_seconds": round(seconds, 1),
        "error": round(error, 4),
        "measured_generation_seconds": of_generation,
        "predicted_generation_seconds": round(generation, 1),
        "generation_error": of_generation and round(generation / of_generation - 1, 4),
        "generation_share": round(found.generation_share, 3),
        "within": abs(error) <= found.speed_error if found.speed_error else None,
    }


def described(row: dict, prompt: int, completion: int):
    """The Job of a row, with completions of one length."""
    from transformers import AutoConfig

    from hf_memopt.estimator.trl_job import describe_task

    config, adapter = row["config"], dict(row.get("lora") or {})
    if isinstance(config, dict):
        sizes = dict(config)
        config = AutoConfig.for_model(sizes.pop("kind"), **sizes)
    half = row["dtype"] == "float16"
    fields = {
        "per_device_train_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row["accumulation"],
        "steps_per_generation": 2 // math.gcd(2, row["micro_batch"]),  # the smallest group, for a quick trace
        "num_generations": 2,
        "max_completion_length": completion,
        "optim": row.get("optim", "adamw_torch_fused"),
        "fp16" if half else "bf16": True,
        **(CHECKPOINTED if row["checkpointing"] else {"activation_checkpointing": False}),
        **row["fields"],
    }
    return describe_task(
        config,
        fields,
        prompt + completion,
        row["gpu"],
        task="grpo",
        peft_config=lora(adapter.pop("r"), **adapter) if adapter else None,
        dtype=row["dtype"],
        quantization_config=four_bits(True, row["dtype"]) if row["method"] == "qlora" else None,
        world_size=row["processes"],
        strategy=row["strategy"],
    )


def again(row: dict) -> dict:
    """What is predicted now."""
    (one,) = (one for one in json.loads(DATA.read_text()) if one["id"] == row["id"])
    return {"predicted_seconds": compare(one)["predicted_seconds"]}


def is_held_back(row: dict) -> bool:
    """True if no constant may ever be fitted to a row."""
    return row["documentation"] != "A" or int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % 3 == 0


def group(row: dict) -> str:
    """The set of rows that one is summed up with."""
    if row["stack"]:
        return row["stack"]
    if row["documentation"] == "B":
        return "partly inferred"
    return HELD_BACK if row["held_back"] else OPEN


def summary(rows: list[dict]) -> dict:
    """Errors of some rows."""
    errors = [row["error"] for row in rows]
    return {
        "rows": len(rows),
        "median": statistics.median(errors),
        "median_size": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "near": sum(abs(error) <= NEAR for error in errors) / len(errors),
        "within": sum(bool(row["within"]) for row in rows),
    }


def stated_error(rows: list[dict]) -> tuple[float, int]:
    """The error that nine of ten rows of no other stack stay within, in steps of 5 %, and their number."""
    errors = sorted(abs(row["error"]) for row in rows if not row["stack"])
    return math.ceil(round(errors[math.ceil(0.9 * len(errors)) - 1] * 20, 6)) / 20, len(errors)


def by_group(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of every group that has any."""
    names = [OPEN, HELD_BACK, *sorted({group(row) for row in rows} - {OPEN, HELD_BACK})]
    return {name: [row for row in rows if group(row) == name] for name in names}


def main() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = []
        for row in pool.map(compare, json.loads(DATA.read_text())):
            rows.append(row)
            figures = f"{row['predicted_seconds']:7.1f} of {row['measured_seconds']:7.1f} s"
            of = row["generation_error"]
            print(
                f"{row['error']:+7.1%}  {figures}  generation {row['generation_share']:4.0%}"
                + ("" if of is None else f" ({of:+.0%})")
                + f"  {group(row)}: {row['id']}  {row['stack']}",
                flush=True,
            )
    for name, found in by_group(rows).items():
        print(name, summary(found))
    print("stated:", stated_error(rows))
    record("speed_generated", rows)


if __name__ == "__main__":
    main()
