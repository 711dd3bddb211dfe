"""A run that is killed four times, each time soon after it saved, and continues: python killed_run.py FOLDER

Writes how often it was killed and its losses to FOLDER.json. Every attempt is a process, forked from one that has
imported everything.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from small_runs import train

FIELDS = {
    "save_strategy": "steps",
    "save_steps": 1,
    "save_total_limit": 3,
    "max_steps": 12,
    "logging_strategy": "steps",
    "logging_steps": 1,
}


def _slowly(trainer) -> None:
    step = trainer.training_step

    def slow(*args, **kwargs):
        time.sleep(0.05)
        return step(*args, **kwargs)

    trainer.training_step = slow


def _attempt(folder: Path, losses: Path, delay: float | None) -> int:
    """Start or resume the run, kill it so many seconds after a new checkpoint; returns how the process ended."""
    before = _checkpoints(folder)
    child = os.fork()
    if child == 0:
        losses.write_text(json.dumps(train(folder, resume=bool(before), prepare=_slowly, **FIELDS).logs))
        os._exit(0)
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if delay is not None and _checkpoints(folder) - before:
            time.sleep(delay)
            os.kill(child, signal.SIGKILL)
            delay = None
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(ended[1])


def _checkpoints(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("checkpoint-*")}


def main(folder: Path) -> None:
    moments, kills, losses = random.Random(5), 0, folder.with_suffix(".losses")
    for _ in range(4):
        if not losses.exists():
            kills += _attempt(folder, losses, moments.uniform(0, 0.4)) == -signal.SIGKILL
    if not losses.exists():
        assert _attempt(folder, losses, None) == 0
    folder.with_suffix(".json").write_text(json.dumps({"kills": kills, "losses": json.loads(losses.read_text())}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
