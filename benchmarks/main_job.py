"""The main job, as `make train` runs it, on this machine's device: python benchmarks/main_job.py"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record


def main() -> None:
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # this Python's programs
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in ("pretrain", "sft"):
            run = Path(folder) / recipe
            subprocess.run(["hf-memopt", "export", "auto", str(run), "--recipe", recipe], check=True)
            start = time.perf_counter()
            subprocess.run(["sh", str(run / "launch.sh")], check=True)
            seconds = time.perf_counter() - start
            report = json.loads((run / "out" / "memory_report.json").read_text())
            row = {"recipe": recipe, "preset": report["preset"], "steps": report["global_step"]}
            row |= {"seconds_with_start_and_sampling": round(seconds, 1), "held_out_loss": report["held_out_loss"]}
            row["predicted_allocated_bytes"] = (report["estimate"] or {}).get("peak_allocated_bytes")
            rows.append(row | {"measured": report["measured"]})
    record("main_job", rows)


if __name__ == "__main__":
    main()
