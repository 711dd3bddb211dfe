"""Part 7: two cards: one process runs out of memory, and both continue or both end."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.case import ROOT, Case
from hf_memopt.contrib.calibration.processes import Skip

PLAIN = {"name": "plain", "rank": 0, "phase": None, "step": 0, "micro": 0}
ENDINGS = {
    "both recover": {**PLAIN, "name": "forward", "rank": 1, "phase": "forward", "step": 2, "micro": 1},
    "both end": {**PLAIN, "name": "end", "rank": 1, "phase": "backward", "step": 2, "micro": 1},
}


def cases(rehearse: bool) -> list[Case]:
    """Endings of two processes; over gloo in a rehearsal."""
    return [
        Case("two_cards", name, 5 + number, {"case": case}, rehearse=rehearse)
        for number, (name, case) in enumerate(ENDINGS.items())
    ]


def measure(case: Case) -> dict:
    """tests/two_processes.py over the two cards."""
    import torch

    cards = torch.cuda.device_count()
    if not case.rehearse and cards < 2:
        raise Skip(f"needs two cards, this machine has {cards}")
    with tempfile.TemporaryDirectory() as folder:
        # The tests' own runs are on the CPU, and their fields are overridden here.
        device = {} if case.rehearse else {"fields": {"use_cpu": False}}
        lines = "\n".join(json.dumps({**one, **device}) for one in (PLAIN, case.settings["case"]))
        program = [sys.executable, "two_processes.py", folder]
        subprocess.run(program, input=lines, text=True, check=True, cwd=ROOT / "tests", capture_output=True)
        found = json.loads(Path(folder, f"{case.settings['case']['name']}.json").read_text())
    return {"backend": "nccl" if cards >= 2 else "gloo", **found}
