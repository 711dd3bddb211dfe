"""What every benchmark writes: its rows, with the machine, the versions and the date."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "results"


def record_each(name: str, make: Callable[..., dict], jobs: Iterable[tuple]) -> None:
    """Record the row that `make` gives for each job, and print it as soon as it is there."""
    rows = []
    for job in jobs:
        rows.append(make(*job))
        print(rows[-1], flush=True)
    record(name, rows)


def record(name: str, rows, command: str = "", **more) -> None:
    """Write results/<name>.json, with more beside the rows."""
    import psutil

    from hf_memopt.hardware import detect

    device = detect()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    result = {
        "benchmark": name,
        "command": command or f"python benchmarks/{name}.py",
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "hardware": {
            "device": device.label,
            "memory_bytes": device.memory,
            "cores": len(usable),
            "host_memory_bytes": psutil.virtual_memory().total,
        },
        "versions": {"python": platform.python_version()}
        | {package: metadata.version(package) for package in ("torch", "transformers", "accelerate", "hf_memopt")},
        "rows": rows,
        **more,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def _commit() -> str:
    """The package's, with a plus where files differ from it; empty without git."""
    ask = ["git", "-C", RESULTS, "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(ask, capture_output=True, text=True).stdout.strip()


def kept(found, *names: str) -> dict:
    """The attributes of an estimate that a row keeps."""
    return {name: getattr(found, name) for name in names}
