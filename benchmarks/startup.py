"""How long the command line and the import take, next to an empty Python: python benchmarks/startup.py"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

from record import record

REPEATS = 15
PROGRAM = str(Path(sys.executable).with_name("hf-memopt"))
COMMANDS = {
    "empty Python": [sys.executable, "-c", "pass"],
    "import hf_memopt": [sys.executable, "-c", "import hf_memopt"],
    "hf-memopt --help": [PROGRAM, "--help"],
    "hf-memopt presets": [PROGRAM, "presets"],
}


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):  # in turns, so that a busy moment of the machine falls on all
        for name, command in COMMANDS.items():
            start = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - start)
    rows = [{"command": name, "median_s": round(statistics.median(taken), 4)} for name, taken in times.items()]
    for row in rows:
        print(f"{row['command']:>20}  {row['median_s'] * 1000:6.0f} ms")
    record("startup", "python benchmarks/startup.py", rows)


if __name__ == "__main__":
    main()
