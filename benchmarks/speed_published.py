"""Predicted speed against published training runs on an A100 and an L40S: python benchmarks/speed_published.py

The rows of data/published_peaks.json that carry tokens per second (IBM's fms-acceleration benchmarks, A100). The
constants of hardware.constants that say "fitted" were fitted to the rows marked so: plain kernels, Mistral-7B and
SantaCoder. The others are predicted. Rows of tier B ran fused kernels (RoPE, RMSNorm, cross entropy), which the trace
does not have: there the prediction should be slower than what was measured. Nothing here was measured by this project.

data/published_peaks_peft.json has PEFT's comparison of its methods: one model, small batches, an L40S. No constant was
fitted to it. Steps there are of the mean length that PEFT published, without autocast.
"""

import itertools
import json
import statistics
from collections import defaultdict
from pathlib import Path
from unittest import mock

import estimator_peft
from estimator_published import config_of, experts_of_then, job_arguments, loss_of_then
from record import record
from rich.progress import track

DATA = Path(__file__).parent / "data" / "published_peaks.json"
FITTED = ("mistralai/Mistral-7B", "bigcode/")
# Group -> which rows.
GROUPS = {
    "A100, fitted": lambda row: row["fitted"],
    "A100": lambda row: row["gpu"].startswith("A100") and row["tier"] == "A" and not row["fitted"],
    "A100, fused kernels": lambda row: row["tier"] == "B",
    "L40S": lambda row: row["gpu"].startswith("L40S"),
}
CLEAR = 0.1  # two rows are compared where their speeds differ by more than this share


def predicted_seconds(row: dict) -> float:
    """Seconds of one step, as the planner predicts them."""
    from hf_memopt.estimator.job import describe
    from hf_memopt.planner.choices import Choice
    from hf_memopt.planner.cost import Cost
    from hf_memopt.planner.sketch import Sketch, traced_jobs

    with loss_of_then(row), experts_of_then(row):
        job = describe(**job_arguments(row))
        (traced,) = traced_jobs([job])
    trained = sum(job.trained_sizes())
    sketch = Sketch(job, (traced, traced), (traced, traced), trained)
    strategy = "fsdp2" if row["n_gpus"] > 1 else "none"
    choice = Choice(strategy, 1, row["grad_accum"] or 1, 0.0, job.fields["optim"], job.dtype)
    return Cost(sketch).step(choice)


def compare(row: dict) -> dict:
    tokens = row["micro_batch"] * (row["grad_accum"] or 1) * row["seq_len"]
    return compared(row, row["tier"] == "A" and row["model"].startswith(FITTED), tokens / predicted_seconds(row))


def compare_adapter(row: dict) -> dict:
    """A row of PEFT's comparison."""
    from hf_memopt.estimator import estimate
    from hf_memopt.estimator.tracing import model

    mean = round(row["also"]["tokens_of_steps"] / row["also"]["steps"] / row["micro_batch"])
    fields = {"per_device_train_batch_size": row["micro_batch"], "optim": "adamw_torch", "max_grad_norm": 1.0}
    adapter = estimator_peft.adapter_of(row)
    with mock.patch.object(model, "add_adapters", estimator_peft.as_measured(model.add_adapters)):
        found = estimate(config_of(row), fields, mean, "l40s", adapter, "bfloat16", padded=True)
    return compared({**row, "tier": "A", "n_gpus": 1}, False, found.tokens_per_second)


def compared(row: dict, fitted: bool, predicted: float) -> dict:
    measured = row["also"]["train_tokens_per_second"]
    shown = ("id", "tier", "gpu", "model", "method", "micro_batch", "n_gpus", "source")
    return {
        **{name: row[name] for name in shown},
        "fitted": fitted,
        "measured_tokens_per_second": measured,
        "predicted_tokens_per_second": round(predicted, 1),
        "error": round(predicted / measured - 1, 4),
    }


def ranked_right(rows: list[dict]) -> tuple[int, int]:
    """Pairs of runs of one model on as many GPUs, with the same kernels, that the prediction orders as they were
    measured, and all such pairs that differ clearly."""
    right = total = 0
    for one, other in itertools.combinations(rows, 2):
        if any(one[name] != other[name] for name in ("model", "n_gpus", "tier")):
            continue
        slow, fast = sorted((one, other), key=lambda row: row["measured_tokens_per_second"])
        if fast["measured_tokens_per_second"] > (1 + CLEAR) * slow["measured_tokens_per_second"]:
            total += 1
            right += fast["predicted_tokens_per_second"] > slow["predicted_tokens_per_second"]
    return right, total


def regrets(rows: list[dict]) -> list[dict]:
    """What choosing by prediction loses: for every model on as many GPUs with the same kernels, over all methods and
    within each, the setting that is predicted to be the fastest beside the one that was."""
    found = []
    key = ("model", "gpu", "n_gpus", "tier")
    for names in (key, (*key, "method")):
        groups = defaultdict(list)
        for row in rows:
            groups[tuple(row[name] for name in names)].append(row)
        for values, group in groups.items():
            if len(group) < 2:
                continue
            chosen = max(group, key=lambda row: row["predicted_tokens_per_second"])
            fastest = max(group, key=lambda row: row["measured_tokens_per_second"])
            regret = 1 - chosen["measured_tokens_per_second"] / fastest["measured_tokens_per_second"]
            found.append(
                {
                    "method": "any",
                    **dict(zip(names, values, strict=True)),
                    "settings": len(group),
                    "chosen": chosen["id"],
                    "fastest": fastest["id"],
                    "regret": round(regret, 4),
                    # Where the choice loses: how far the two predictions are off.
                    "chosen_error": chosen["error"],
                    "fastest_error": fastest["error"],
                }
            )
    return found


def summary(rows: list[dict]) -> dict:
    """Errors of a group's rows, and the pairs that are ranked right."""
    errors = [abs(row["error"]) for row in rows]
    right, total = ranked_right(rows)
    return {
        "rows": len(rows),
        "median": statistics.median(errors),
        "worst": max(errors),
        "near": sum(error <= 0.25 for error in errors) / len(errors),
        "pairs": f"{right} of {total}",
    }


def main() -> None:
    published = [row for row in json.loads(DATA.read_text()) if row["also"].get("train_tokens_per_second")]
    rows = [compare(row) for row in track(published, description="published speeds")]
    adapters = json.loads(estimator_peft.DATA.read_text())
    rows += [compare_adapter(row) for row in track(adapters, description="PEFT's rows")]
    for row in sorted(rows, key=lambda row: (row["tier"], not row["fitted"], row["n_gpus"], row["error"])):
        kind = "fitted" if row["fitted"] else "predicted"
        job = f"{row['n_gpus']} × {row['micro_batch']}  {row['model']}, {row['method']}"
        print(f"{row['error']:+7.1%}  {row['tier']} {kind:>9}  {job}")
    record("speed_published", rows, regrets=regrets(rows))


if __name__ == "__main__":
    main()
