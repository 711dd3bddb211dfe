"""The video recipe as it comes: how long it takes, what it learns, what memory was predicted and measured.

python benchmarks/video_demo.py
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import record

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        command = [sys.executable, ROOT / "recipes" / "video_sft.py", "--preset", "cpu", "--output_dir", folder]
        subprocess.run(command, check=True, cwd=ROOT)
        seconds = time.perf_counter() - began
        report = json.loads((Path(folder) / "memory_report.json").read_text())
    row = {
        "seconds": round(seconds, 1),
        "steps": report["global_step"],
        "held_out_loss": report["held_out_loss"],
        "predicted_bytes": report["estimate"]["peak_allocated_bytes"],
        "measured_bytes": report["measured"]["peak_allocated_bytes"],
    }
    print(row)
    record("video_demo", [row])


if __name__ == "__main__":
    main()
