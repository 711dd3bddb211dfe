"""Everything that only a card can show: python -m benchmarks.gpu, or make gpu ARGS="--budget 500"

Each case runs in a process of its own with a limit of its own; the most valuable ones come first, whatever part they
belong to. Its row is in results.json as soon as it ends, so that the runner may be killed at any moment: the next
call goes on where this one ended. Predictions need no card and come last, or in a later call with --tables.

Results go to OUT/<device>/: results.json (measured), predictions.json, tables.json and tables.md.
"""

import argparse
import importlib
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.gpu.case import COMMITTED, Case, Results, load
from benchmarks.gpu.runner import Runner
from benchmarks.gpu.tables import PREDICTED, write_tables
from hf_memopt.errors import InputError, choose
from hf_memopt.files import write_whole

PARTS = ("estimator", "speed", "smaller", "oom", "levers", "allocator", "two_cards")
REHEARSAL = "rehearsal"
HEADER = ("benchmark", "rehearsal", "hardware", "driver", "cuda", "cards", "cores", "versions")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    deadline = time.monotonic() + args.budget
    cases = all_cases(args.parts, args.rehearse)
    runner = Runner()
    command = " ".join(["python -m benchmarks.gpu", *(sys.argv[1:] if argv is None else argv)])
    top = {} if args.tables else runner.run(Case("", "header", 0, rehearse=args.rehearse), 120, "header")
    folder = args.out / device_folder(args, top)
    results = Results(
        folder, {name: top.get(name) for name in HEADER} | {"command": command}, args.fresh and not args.tables
    )
    if not args.tables:
        measure_cases(runner, cases, results, deadline)
    if not results.rows:
        raise InputError(f"{results.path} has no rows yet: run without --tables first, on the card")
    predict_rows(runner, results, deadline, args.fresh)
    write_tables(results.path.parent)
    print(f"wrote {results.path.parent}/tables.md")
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--budget", type=float, default=1e9, help="seconds; no case begins that might outlast them")
    parser.add_argument("--resume", action="store_true", help="keep what earlier calls measured (this is the default)")
    parser.add_argument("--fresh", action="store_true", help="measure everything again; with --tables, predict again")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny models, under another name")
    parser.add_argument("--tables", action="store_true", help="no measuring: predict and write the tables; no card")
    parser.add_argument("--device", help="with --tables: the folder's name, where there are several")
    parser.add_argument("--out", type=Path, default=COMMITTED, help="folder (default: benchmarks/results/gpu)")
    args = parser.parse_args(argv)
    args.parts = [name.strip() for name in args.parts.split(",") if name.strip()]
    for name in args.parts:
        if name not in PARTS:
            raise choose("--parts", name, PARTS)
    args.out = args.out.expanduser().resolve()
    return args


def all_cases(parts: list[str], rehearse: bool) -> list[Case]:
    """The cases of the chosen parts, most valuable first."""
    found = [case for part in parts for case in importlib.import_module(f"benchmarks.gpu.{part}").cases(rehearse)]
    return sorted(found, key=lambda case: case.worth)


def device_folder(args: argparse.Namespace, top: dict) -> str:
    """The name of the device's folder below --out.

    Args:
        top: the header that was made on this machine.

    Raises:
        InputError: no card here and no rehearsal; or --tables of several devices.
    """
    if args.rehearse:
        return REHEARSAL
    if args.device:
        return args.device
    if args.tables:
        measured = [path.parent.name for path in sorted(args.out.glob("*/results.json"))]
        if len(measured) != 1:
            raise InputError(f"--tables: name one with --device: {', '.join(measured) or 'nothing was measured yet'}")
        return measured[0]
    if top["outcome"] == "failed":
        raise InputError(f"this machine cannot be described: {top['reason']}")
    if top["hardware"]["backend"] not in ("cuda", "rocm"):
        raise InputError("no CUDA device here: run it on a machine with a card, or rehearse with --rehearse")
    return top["hardware"]["name"]


def measure_cases(runner: Runner, cases: list[Case], results: Results, deadline: float) -> None:
    """Measure what no earlier call has; what failed there comes after what was never tried."""
    waiting = [case for case in cases if not results.is_measured(case)]
    waiting.sort(key=lambda case: case.key in results.rows)
    print(f"{len(cases)} cases, {len(cases) - len(waiting)} measured already")
    for number, case in enumerate(waiting, 1):
        left = deadline - time.monotonic()
        if left < min(20, case.limit):
            print(f"{len(waiting) - number + 1} cases are left for the next call: the budget is spent")
            break
        limit = 20 * case.limit if case.rehearse else case.limit  # a loaded CPU is no reason to fail a rehearsal
        row = runner.run(case, min(limit, left))
        results.add(row)
        print(
            f"[{number}/{len(waiting)}] {row['seconds']:5.1f} s  {row['outcome']:8}  {case.key}  "
            f"{row.get('reason', '')[-200:]}",
            flush=True,
        )


def predict_rows(runner: Runner, results: Results, deadline: float, fresh: bool) -> None:
    """Predict the measured training jobs that have no prediction yet, several at a time, until the deadline."""
    path = results.path.with_name("predictions.json")
    known = load(path) if path.is_file() and not fresh else {}
    content = load(results.path)
    device = content["hardware"]
    rows = [row for row in content["rows"] if row["part"] in PREDICTED and row["outcome"] == "measured"]
    jobs = {json.dumps(row["settings"], sort_keys=True): row for row in rows}
    waiting = {key: row for key, row in jobs.items() if "refused" in known.get(key, {"refused": ""})}

    def predict(item) -> tuple[str, dict | None]:
        key, row = item
        if time.monotonic() + 20 > deadline:
            return key, None
        case = Case(row["part"], row["case"], 0, row["settings"])
        return key, runner.run(case, min(300, deadline - time.monotonic()), "predict", device)

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:
        for number, (key, row) in enumerate(pool.map(predict, waiting.items()), 1):
            if row is None or row["outcome"] != "measured":
                reason = (row or {}).get("reason", "the budget is spent")[-300:]
                print(f"[{number}/{len(waiting)}] {waiting[key]['case']} is not predicted: {reason}")
                continue
            known[key] = row["predicted"]
            write_whole(path, json.dumps(known, indent=1) + "\n")
            print(f"[{number}/{len(waiting)}] predicted {waiting[key]['case']}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
