"""Predicted speed against published training runs: python benchmarks/speed_published.py

* data/published_peaks.json: the rows that carry tokens per second (IBM's fms-acceleration benchmarks, A100). Constants
  that say "fitted to published speeds on an A100" were fitted to Mistral-7B and SantaCoder with plain kernels.
* data/published_peaks_peft.json: PEFT's comparison of its methods, an L40S. Constants that say so were fitted to the
  half whose id has an even SHA-256. Steps there are of the mean length that PEFT published, without autocast.
* data/published_speeds.json: ten further sources; one constant was fitted to two of their rows (FITTED_RUNS).
  before_tokens_per_second is what was predicted when nobody here had seen them.

A row's `stack` names what its software has and the trace has not (torch.compile, fused kernels): such rows are shown
and left out of every summary. Nothing here was measured by this project.
"""

import hashlib
import itertools
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from unittest import mock

import estimator_peft
from estimator_published import config_of, experts_of_then, job_arguments, loss_of_then
from jobs import CHECKPOINTED, four_bits, lora
from record import RESULTS, record
from rich.progress import track

FOLDER = Path(__file__).parent / "data"
DATA = FOLDER / "published_peaks.json"
FITTED = ("mistralai/Mistral-7B", "bigcode/")
FITTED_RUNS = ("vx-lora-256", "vx-qlora-256")  # host_launch_seconds of an A100
FEW = 4  # rows, below which a family of cards has no error of its own
SETTINGS = ("fms-acceleration", "peft")  # sources whose rows of a model differ in settings alone
CLEAR = 0.1  # two rows are compared where their speeds differ by more than this share
PEFT_STACK = {
    "peft:BOFT": "permutations copied from host memory",  # estimator_peft.as_measured
    # Its coalesce() waits for the device, so that launching (0.11 s of 0.27) hides nothing (peft 0.21, frod/layer.py).
    "peft:FROD": "sparse matrices sorted in each layer",
}


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
    from hf_memopt.estimator.job import describe
    from hf_memopt.estimator.timing.speed_errors import job_kind

    tokens = row["micro_batch"] * (row["grad_accum"] or 1) * row["seq_len"]
    stack = "" if row["tier"] == "A" else "fused kernels"
    fitted = not stack and row["model"].startswith(FITTED)
    speeds = row["also"]["train_tokens_per_second"], tokens / predicted_seconds(row)
    row = {**row, "gpu": "a100_80gb", "source_id": "fms-acceleration", "stack": stack}
    return compared(row, fitted, *speeds, job_kind(describe(**job_arguments(row))))


def compare_adapter(row: dict) -> dict:
    """A row of PEFT's comparison."""
    from hf_memopt.estimator import estimate
    from hf_memopt.estimator.tracing import model

    mean = round(row["also"]["tokens_of_steps"] / row["also"]["steps"] / row["micro_batch"])
    fields = {"per_device_train_batch_size": row["micro_batch"], "optim": "adamw_torch", "max_grad_norm": 1.0}
    adapter = estimator_peft.adapter_of(row)
    with mock.patch.object(model, "add_adapters", estimator_peft.as_measured(model.add_adapters)):
        found = estimate(config_of(row), fields, mean, "l40s", adapter, "bfloat16", padded=True)
    row = {**row, "gpu": "l40s", "n_gpus": 1, "source_id": "peft", "stack": PEFT_STACK.get(row["method"], "")}
    fitted = not row["stack"] and int(hashlib.sha256(row["id"].encode()).hexdigest(), 16) % 2 == 0
    return compared(row, fitted, row["also"]["train_tokens_per_second"], found.tokens_per_second, found.speed_kind)


def compare_run(row: dict) -> dict:
    """A row of data/published_speeds.json."""
    from transformers import AutoConfig

    from hf_memopt import MemoryArguments
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.job import describe

    fields = {
        "per_device_train_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row["grad_accum"],
        "optim": row["optimizer"],
        "max_grad_norm": row["max_grad_norm"],
        **(CHECKPOINTED if row["checkpointing"] else {"activation_checkpointing": False}),
        **({row["autocast"]: True} if row["autocast"] else {}),
    }
    config, adapter, bits = row["config"], dict(row.get("lora") or {}), row.get("quantization")
    autocast_adapter_dtype = adapter.pop("autocast_adapter_dtype", True)
    storage = {"bnb_4bit_quant_storage": bits["storage"]} if bits and "storage" in bits else {}
    if isinstance(config, dict):
        sizes = dict(config)
        config = AutoConfig.for_model(sizes.pop("kind"), **sizes)
    if adapter:
        names = {"alpha": "lora_alpha", "dropout": "lora_dropout"}
        adapter = lora(
            adapter["r"], **{names.get(name, name): value for name, value in adapter.items() if name != "r"}
        )
    job = describe(
        config,
        fields,
        row["seq_len"],
        row["gpu"],
        peft_config=adapter or None,
        autocast_adapter_dtype=autocast_adapter_dtype,
        dtype=row["dtype"],
        attn_implementation=row["attention"],
        quantization_config=four_bits(bits["double"], bits["compute"], **storage) if bits else None,
        kbit_preparation=bool(bits and bits["kbit"]),
        memory_args=MemoryArguments(**row["memory_arguments"]) if row.get("memory_arguments") else None,
        world_size=row["n_gpus"],
        strategy=row["strategy"],
        padded=row["padded"],
    )
    found = estimate_job(job)
    row = {**row, "source_id": row["id"].split("-")[0]}
    fitted = row["id"] in FITTED_RUNS
    return compared(row, fitted, row["measured_tokens_per_second"], found.tokens_per_second, found.speed_kind)


def again(row: dict) -> dict:
    """What is predicted now."""
    for file, compare_row in SOURCES.items():
        for one in json.loads((FOLDER / file).read_text()):
            if one["id"] == row["id"]:
                return {"predicted_tokens_per_second": compare_row(one)["predicted_tokens_per_second"]}
    raise KeyError(row["id"])


SOURCES = {
    "published_peaks.json": compare,
    "published_peaks_peft.json": compare_adapter,
    "published_speeds.json": compare_run,
}


def compared(row: dict, fitted: bool, measured: float, predicted: float, kind: str) -> dict:
    from hf_memopt.estimator.timing.speed_errors import find_error
    from hf_memopt.hardware import get_hardware

    stated = find_error(kind, get_hardware(row["gpu"]))
    before = row.get("before_tokens_per_second")
    error = predicted / measured - 1
    shown = ("id", "source_id", "gpu", "model", "method", "micro_batch", "n_gpus", "source", "stack", "inferred")
    return {
        **{name: row[name] for name in shown if name in row},
        "kind": kind,
        "fitted": fitted,
        "measured_tokens_per_second": measured,
        "predicted_tokens_per_second": round(predicted, 1),
        "error": round(error, 4),
        "error_before": round(before / measured - 1, 4) if before else None,
        "stated_error": stated and stated.error,
        "within": None if stated is None else abs(error) <= stated.error,
    }


def ranked_right(rows: list[dict]) -> tuple[int, int]:
    """Pairs of one source's runs with the same software that the prediction orders as they were measured, and all such
    pairs that differ clearly."""
    right = total = 0
    for one, other in itertools.combinations(rows, 2):
        if any(one[name] != other[name] for name in ("source_id", "stack")):
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
    rows = [row for row in rows if row["source_id"] in SETTINGS]
    key = ("model", "gpu", "n_gpus", "stack")
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


def held_out(rows: list[dict]) -> list[dict]:
    """Rows to which no constant was fitted and whose software the trace has."""
    return [row for row in rows if not row["fitted"] and not row["stack"]]


def architecture(row: dict) -> str:
    """The family of a row's card."""
    from hf_memopt.hardware import get_hardware

    return get_hardware(row["gpu"]).architecture


def groups(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """(kind, family of cards) -> the rows."""
    found = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["kind"], architecture(row))):
        found[row["kind"], architecture(row)].append(row)
    return found


def stated_errors(rows: list[dict]) -> dict[tuple[str, str], tuple[float, int]]:
    """(kind, family of cards) -> the error to state, and the number of rows; of families with few rows the error of
    the kind's rows on all cards."""
    found = groups(held_out(rows))
    pooled = defaultdict(list)
    for (kind, _), group in found.items():
        pooled[kind] += group
    return {
        key: (_nine_in_ten([row["error"] for row in (group if len(group) >= FEW else pooled[key[0]])]), len(group))
        for key, group in found.items()
    }


def taught_error(rows: list[dict]) -> float:
    """The error that is left where up to three others of a row's source, cards, method and kind have scaled its
    prediction by the median of what they measured over what was predicted for them; of every choice of them."""
    found = defaultdict(list)
    for row in held_out(rows):
        setup = (row["source_id"], row["gpu"], row["n_gpus"], row["method"], row["kind"])
        found[setup].append(row["measured_tokens_per_second"] / row["predicted_tokens_per_second"])
    return _nine_in_ten(
        statistics.median(others) / ratio - 1
        for ratios in found.values()
        for at, ratio in enumerate(ratios)
        for runs in (1, 2, 3)
        for others in itertools.combinations(ratios[:at] + ratios[at + 1 :], runs)
    )


def _nine_in_ten(errors: Iterable[float]) -> float:
    """The error that nine of ten stay within, in steps of 5 %."""
    errors = sorted(map(abs, errors))
    nine_in_ten = errors[math.ceil(0.9 * len(errors)) - 1]
    return math.ceil(round(nine_in_ten * 20, 6)) / 20


def summary(rows: list[dict]) -> dict:
    """Errors of a group's rows, and the pairs that are ranked right."""
    errors = [row["error"] for row in rows]
    right, total = ranked_right(rows)
    return {
        "rows": len(rows),
        "median": statistics.median(errors),
        "median_size": statistics.median(map(abs, errors)),
        "worst": max(errors, key=abs),
        "near": sum(abs(error) <= 0.25 for error in errors) / len(errors),
        "pairs": f"{right} of {total}",
    }


def main() -> None:
    published = [row for row in json.loads(DATA.read_text()) if row["also"].get("train_tokens_per_second")]
    before = {row["id"]: row for row in json.loads((RESULTS / "speed_published.json").read_text())["rows"]}
    rows = [compare(row) for row in track(published, description="published speeds")]
    adapters = json.loads(estimator_peft.DATA.read_text())
    rows += [compare_adapter(row) for row in track(adapters, description="PEFT's rows")]
    runs = json.loads((FOLDER / "published_speeds.json").read_text())
    rows += [compare_run(row) for row in track(runs, description="further sources")]
    for row in rows:  # of the first two sources: what the last published version predicted
        if row["error_before"] is None and (old := before.get(row["id"])):
            row["error_before"] = old.get("error_before") if "error_before" in old else old["error"]
    for row in sorted(rows, key=lambda row: (row["stack"], not row["fitted"], row["kind"], row["error"])):
        kind = "fitted" if row["fitted"] else "predicted"
        job = f"{row['n_gpus']} × {row['micro_batch']}  {row['model']}, {row['method']}, {row['gpu']}  {row['stack']}"
        was = "" if row["error_before"] is None else f"({row['error_before']:+6.1%})"
        print(f"{row['error']:+7.1%} {was:>9} {kind:>9}  {row['kind']}: {job}")
    stated = stated_errors(rows)
    for key, group in groups(held_out(rows)).items():
        print(*key, {**summary(group), "stated": stated[key]})
    print("pairs of all sources ranked right:", "{} of {}".format(*ranked_right(rows)))
    record("speed_published", rows, regrets=regrets(rows))


if __name__ == "__main__":
    main()
