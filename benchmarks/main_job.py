"""The main job, as `make train` runs it, and the video recipe as it comes: python benchmarks/main_job.py

On this machine's device: how long they take, what they learn, what memory was predicted and measured.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

ROOT = Path(__file__).resolve().parent.parent
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # this Python's programs


def run(command: list, output: Path) -> tuple[dict, float]:
    """The report that a run leaves in its folder, and the seconds that it took."""
    start = time.perf_counter()
    subprocess.run(command, check=True, cwd=ROOT)
    return json.loads((output / "memory_report.json").read_text()), round(time.perf_counter() - start, 1)


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in ("pretrain", "sft"):
            job = Path(folder) / recipe
            subprocess.run(["hf-memopt", "export", "auto", job, "--recipe", recipe], check=True)
            report, seconds = run(["sh", job / "launch.sh"], job / "out")
            row = {"recipe": recipe, "preset": report["preset"], "steps": report["global_step"]}
            row |= {"seconds_with_start_and_sampling": seconds, "held_out_loss": report["held_out_loss"]}
            row["predicted_allocated_bytes"] = (report["estimate"] or {}).get("peak_allocated_bytes")
            rows.append(row | {"measured": report["measured"]})
        output = Path(folder) / "video"
        report, seconds = run(
            [sys.executable, "recipes/video_sft.py", "--preset", "cpu", "--output_dir", output], output
        )
    record("main_job", rows)
    row = {"seconds": seconds, "steps": report["global_step"], "held_out_loss": report["held_out_loss"]}
    row |= {"predicted_bytes": report["estimate"]["peak_allocated_bytes"]}
    row |= {"measured_bytes": report["measured"]["peak_allocated_bytes"]}
    record("video_demo", [row], "python benchmarks/main_job.py")


if __name__ == "__main__":
    main()
