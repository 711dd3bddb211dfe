"""Plans beside the settings that experts ship: python benchmarks/experts.py

A row of data/experts.toml is a configuration of another tool, as hf_memopt.foreign translates it, and the devices that
it is for. The expert's job is estimated as it is; then plan() is asked for the same model, method,
length, precision, effective batch and devices, with everything else left open. A row is won where the plan fits and is
at most 5 % slower than the expert's settings, both by this package's own estimates; nothing was measured on a GPU.

`--read FOLDER` reads the configurations again, from checkouts at FOLDER/<owner>+<name>; `--again TEXT` plans the rows
anew whose source has the text, `--again ""` all. `--models` plans every bundled model on five boxes instead.
"""

import argparse
import json
import os
import time
import tomllib
import traceback
from dataclasses import replace
from pathlib import Path

from record import RESULTS, kept, record

from hf_memopt.cli.estimate import settle_job
from hf_memopt.errors import InputError, one_line
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import list_architectures, load_config
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.foreign.key_table import list_tables
from hf_memopt.foreign.source import read_source
from hf_memopt.foreign.translate import Translation
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.planner.plan import plan_job
from hf_memopt.planner.settle import PLANNED_TASKS, left_open

DATA = Path(__file__).parent / "data" / "experts.toml"
TABLES = {table.name: table for table in list_tables().values()}
SLOWER = 1.05  # at most, of a plan that wins
BOXES = ("rtx_3060", "rtx_4090", "a100_80gb", "h100_80gb", "h100_80gbx8")
ESTIMATED = ("device_bytes", "host_bytes", "tokens_per_second", "estimated")


def expert_spec(row: dict) -> JobSpec:
    """The expert's job. Adapters are in fp32 under autocast on both sides, as peft has them by default."""
    translation = Translation(TABLES[row["tool"]], fields=dict(row["fields"]))
    spec = translation.spec(row.get("seq_len"))
    spec = replace(spec, hardware=row["hardware"], world_size=None, strategy=row.get("strategy", spec.strategy))
    if spec.method == "full":
        return spec
    tool = replace(spec.tool, autocast_adapter_dtype=True)
    return replace(spec, tool=tool, training=spec.training | {"bf16": not spec.training.get("fp16")})


def asked_spec(spec: JobSpec, masters: bool) -> JobSpec:
    """The same job as plan() is asked for it: without the expert's answers to what a plan chooses.

    Args:
        masters: the expert's engine keeps fp32 master weights, whatever it loads.
    """
    spec, pure = left_open(spec), spec.method == "full" and not masters  # in the precision that is loaded
    adam = "adamw" in str(spec.training.get("optim", "adamw"))
    chosen = [*["optim"] * adam, *["bf16"] * (not pure)]
    return replace(
        spec,
        tool=None,
        strategy=None,
        training={name: value for name, value in spec.training.items() if name not in chosen},
        memory_args=MemoryArguments(),
        named=frozenset(),
        dtype=spec.dtype if pure else None,
        quantization=spec.quantization if spec.method == "qlora" else {},
    )


def run(row: dict) -> dict:
    """What is predicted of a row: the expert's settings, the plan, and how they compare."""
    spec = expert_spec(row)
    result = {key: row[key] for key in ("source", "hardware")} | {"model": spec.model, "method": spec.method}
    try:
        job = spec_job(settle_job(spec))
        theirs = estimate_job(job, on_all_cores)
        began = time.perf_counter()
        plan = plan_job(asked_spec(spec, job.engine.master_weights))
        took = time.perf_counter() - began
    except InputError as error:
        return result | {"won": False, "error": one_line(error)}
    result |= {"seq_len": plan.spec.seq_len, "effective_batch_size": plan.spec.effective_batch_size}
    result |= {"expert": kept(theirs, *ESTIMATED, "fits"), "plan_seconds": round(took, 1)}
    result |= {"plan": None, "relative_time": None, "won": not theirs.fits}
    if not plan.profiles:
        return result | {"reasons": [f"{reason.settings}: {reason.reason}" for reason in plan.rejected][:4]}
    best = plan.profiles[-1]
    ours = {"profile": best.name, "settings": best.summary, **kept(best.estimate, *ESTIMATED)}
    relative = theirs.tokens_per_second / best.tokens_per_second if best.tokens_per_second else None
    relative = relative and round(relative, 3)
    return result | {
        "plan": ours,
        "relative_time": relative,
        "won": not theirs.fits or relative is None or relative <= SLOWER,
    }


def run_model(model: str, hardware: str) -> dict:
    """The plan of a bundled model with its defaults."""
    began, result = time.perf_counter(), {"model": model, "hardware": hardware}
    try:
        plan = plan_job(JobSpec(model=model, hardware=hardware, method="any"))
    except Exception as error:
        known = isinstance(error, InputError)
        return result | {"error": one_line(error) if known else "".join(traceback.format_exception(error)[-3:])}
    result |= {"seconds": round(time.perf_counter() - began, 1), "method": plan.spec.method}
    if plan.profiles:
        return result | {"settings": plan.usual.summary, "device_bytes": plan.usual.estimate.device_bytes}
    return result | {"nearest": plan.nearest}


def resumed(name: str, keys: tuple[str, ...], jobs: list[dict], again: str | None, make) -> None:
    """Record the result of every job; those that an earlier run recorded are kept."""
    path = RESULTS / f"{name}.json"
    old = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows = {tuple(row[key] for key in keys): row for row in old}
    for job in jobs:
        key = tuple(job[key] for key in keys)
        if key in rows and (again is None or again not in " ".join(key)):
            continue
        rows[key] = make(job)
        print(json.dumps(rows[key]), flush=True)
        ordered = [rows[place] for job in jobs if (place := tuple(job[key] for key in keys)) in rows]
        record(name, ordered, **summed(ordered))


def summed(rows: list[dict]) -> dict:
    """The counts of the rows."""
    if rows and "won" in rows[0]:
        return {"won": sum(row["won"] for row in rows), "of": len(rows)}
    return {"errors": sum("error" in row for row in rows), "of": len(rows)}


def read_again(folder: Path) -> None:
    """Write data/experts.toml with the fields that its files are translated to."""
    content = DATA.read_text(encoding="utf-8")
    head, rows = content.partition("[[rows]]")[0], tomllib.loads(content)["rows"]
    parts = []
    for row in rows:
        if not row.get("by_hand"):
            repository, path = row["source"].split(":")
            os.chdir(folder / repository.replace("/", "+"))
            source = read_source(path)
            translation = source.translate()
            translation.check()
            row |= {"tool": source.table.name, "fields": translation.fields}
        parts.append("\n".join(["[[rows]]", *(f"{key} = {as_toml(value)}" for key, value in row.items())]))
    DATA.write_text(head + "\n\n".join(parts) + "\n", encoding="utf-8")


def as_toml(value) -> str:
    """A value as TOML, a table in one line."""
    if isinstance(value, dict):
        return (
            "{ "
            + ", ".join(f"{json.dumps(key)} = {as_toml(part)}" for key, part in value.items() if part is not None)
            + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(as_toml, value)) + "]"
    return json.dumps(value)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--read", type=Path)
    parser.add_argument("--again")
    parser.add_argument("--models", action="store_true")
    options = parser.parse_args()
    if options.read:
        read_again(options.read.resolve())
    elif options.models:
        models = [name for name in list_architectures() if infer_task(load_config(name)) in PLANNED_TASKS]
        jobs = [{"model": model, "hardware": box} for model in models for box in BOXES]
        resumed("experts_models", ("model", "hardware"), jobs, options.again, lambda job: run_model(**job))
    else:
        rows = tomllib.loads(DATA.read_text(encoding="utf-8"))["rows"]
        resumed("experts", ("source", "hardware"), rows, options.again, run)


if __name__ == "__main__":
    main()
