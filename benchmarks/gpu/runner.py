"""Runs a case in a process of its own, with a limit of its own; and says what machine this is."""

import contextlib
import dataclasses
import importlib
import json
import multiprocessing
import os
import platform
import signal
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.case import ROOT, Case, Skip, die_with_parent
from hf_memopt.errors import InputError
from hf_memopt.files import write_whole

TAIL = 1500  # characters of a failed case's output that are kept


class Runner:
    """Runs cases, each in a process of its own, forked from one that has imported everything.

    Where CUDA turns out to have been started before the fork, which no card was there to exclude, every later case
    gets a process that imports for itself.
    """

    def __init__(self) -> None:
        # Asks the driver through NVML whether there is a card: cudaGetDeviceCount would start CUDA.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(["benchmarks.gpu.warm"])

    def run(self, case: Case, limit: float, task: str = "measure", device: dict | None = None) -> dict:
        """A case's row: outcome is measured (with what the task gave), skipped or failed (with `reason`)."""
        row = {
            "case": case.key,
            "part": case.part,
            "settings": case.settings,
            "env": case.env,
            "date": datetime.now(UTC).date().isoformat(),
        }
        began = time.monotonic()
        found = self._run(case, limit, task, device)
        started = any(phrase in found.get("reason", "") for phrase in ("forked subprocess", "initialization error"))
        if started and self.context.get_start_method() == "forkserver":
            print("CUDA cannot be used after the fork: every case imports for itself from here on")
            self.context = multiprocessing.get_context("spawn")
            found = self._run(case, limit, task, device)
        return row | found | {"seconds": round(time.monotonic() - began, 1)}

    def _run(self, case: Case, limit: float, task: str, device: dict | None) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            answer, log = Path(folder, "answer.json"), Path(folder, "log")
            process = self.context.Process(target=run_case, args=(case, task, device, answer, log))
            process.start()
            process.join(limit)
            ended = f"took longer than {limit:.0f} s" if process.is_alive() else f"exit code {process.exitcode}"
            end_session(process)
            if answer.is_file():
                return json.loads(answer.read_text())
            text = log.read_text(errors="replace").strip() if log.is_file() else ""
            return {"outcome": "failed", "reason": f"{ended}: {text[-TAIL:]}"}


def end_session(process: multiprocessing.Process) -> None:
    """End a case's process and what it started, which would keep the card's memory."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def run_case(case: Case, task: str, device: dict | None, answer: Path, log: Path) -> None:
    """In the case's own process: measure or predict, and write the answer."""
    os.setsid()
    die_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    os.environ |= case.env
    if case.rehearse or task == "predict":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        if task == "predict":
            from hf_memopt.calibration.training import Setting, predict
            from hf_memopt.hardware import Hardware

            try:
                found = {"predicted": predict(Setting(**case.settings), Hardware(**device))}
            except InputError as reason:  # the estimator says that it does not model this job
                found = {"predicted": {"refused": str(reason)}}
        elif task == "header":
            found = header(case.rehearse)
        else:
            found = {"measured": importlib.import_module(f"benchmarks.gpu.{case.part}").measure(case)}
        found["outcome"] = "measured"
    except Skip as reason:
        found = {"outcome": "skipped", "reason": str(reason)}
    write_whole(answer, json.dumps(found, default=str))


def header(rehearse: bool) -> dict:
    """Hardware, driver, versions and command, for the top of results.json."""
    import torch

    from hf_memopt.hardware import detect

    device = detect()
    if rehearse:
        device = dataclasses.replace(device, label=f"rehearsal on {device.label}")
    packages = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "hf_memopt")
    return {
        "benchmark": "gpu",
        "rehearsal": rehearse,
        "hardware": {**vars(device), "sources": dict(device.sources)},
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cards": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def driver() -> str | None:
    """The NVIDIA driver's version."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # hf_memopt runs from a checkout, too
        return None
