"""Runs a case in a process of its own, with a limit of its own; and says what machine this is."""

import dataclasses
import functools
import importlib
import os
import platform
import time
from datetime import UTC, datetime
from importlib import metadata

from benchmarks.gpu.case import ROOT, Case
from hf_memopt.contrib.calibration.processes import Processes
from hf_memopt.errors import InputError
from hf_memopt.hardware.measured import SWITCH, versions_here


class Runner:
    """Runs cases, each in a process of its own."""

    def __init__(self) -> None:
        self.processes = Processes("hf_memopt.contrib.calibration.warm")

    def run(self, case: Case, limit: float, task: str = "measure", device: dict | None = None) -> dict:
        """A case's row: outcome is measured (with what the task gave), skipped or failed (with `reason`)."""
        row = {
            "case": case.key,
            "part": case.part,
            "settings": case.settings,
            "env": case.env,
            "date": datetime.now(UTC).date().isoformat(),
        }
        env = {"CUDA_VISIBLE_DEVICES": ""} if case.rehearse or task == "predict" else {}
        env[SWITCH] = "off"  # what is compared are the package's own assumptions
        began = time.monotonic()
        found = self.processes.run(functools.partial(run_case, case, task, device), limit, {**case.env, **env})
        return row | found | {"seconds": round(time.monotonic() - began, 1)}


def run_case(case: Case, task: str, device: dict | None) -> dict:
    """In the case's own process: measure, predict or describe."""
    os.chdir(ROOT)
    if task == "predict":
        from hf_memopt.contrib.calibration.training import Setting, predict
        from hf_memopt.hardware import Hardware

        try:
            return {"predicted": predict(Setting(**case.settings), Hardware(**device))}
        except InputError as reason:  # the estimator says that it does not model this job
            return {"predicted": {"refused": str(reason)}}
    if task == "header":
        return header(case.rehearse)
    return {"measured": importlib.import_module(f"benchmarks.gpu.{case.part}").measure(case)}


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
        "driver": versions_here()["driver"],
        "cuda": torch.version.cuda,
        "cards": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # hf_memopt runs from a checkout, too
        return None
