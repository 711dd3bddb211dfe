"""Runs of this machine: how fast they were beside their predictions scales what is predicted of others of their kind.

The end of every recipe's run leaves its figures in the cache; $HF_MEMOPT_RUNS names another folder, of which every
memory_report.json below counts too, or is "off". Memory is never scaled: a difference there is a fault to be seen.
"""

import functools
import hashlib
import logging
import math
import os
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_memopt.errors import InputError, one_line
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.files import cache_folder, read_bytes, read_json, user_path, write_json
from hf_memopt.hardware.measured import MEASURABLE, is_off, measured_on
from hf_memopt.hardware.measured import SWITCH as CALIBRATION

logger = logging.getLogger(__name__)
SWITCH = "HF_MEMOPT_RUNS"
# Nine of ten published runs stayed within this of what up to three others of the same machine, method and kind make of
# their prediction (benchmarks/speed_published.py, taught_error).
ERROR = 0.2
_NAME = "memory_report.json"
_MOST = 200  # reports, the newest
_EXACT = 0.01  # of predicted memory; what differs by more is said
_FEWEST_STEPS = 5  # beside the first, which waits for workers and compiles
_SHORTEST = 0.5  # of the predicted tokens of a step: shorter batches are bound by something else
_LARGEST_LOG = 2**24  # bytes of its end
_LOGGED = re.compile(rb"""train_samples_per_second['"]?\s*[:=]\s*['"]?(\d+\.?\d*(?:e[-+]?\d+)?)""")
_KEPT = ("date", "hardware", "model", "method", "strategy", "speed", "relative_error")


@dataclass(frozen=True)
class OwnRuns:
    """What runs of one setup say together.

    Attributes:
        ratio: median of measured over predicted tokens per second.
        runs: how many there are.
        memory_error: predicted peak over the measured one, less 1, of the run where it is largest; None unknown.
    """

    ratio: float
    runs: int
    memory_error: float | None

    @property
    def counted(self) -> str:
        """How many they are, in words."""
        return "one of your runs" if self.runs == 1 else f"{self.runs} of your runs"

    def error(self, published: float | None) -> float:
        """The share by which a scaled prediction may be off, beside that of predictions that are not scaled."""
        agrees = published is not None and abs(self.ratio - 1) <= published
        return min(ERROR, published) if agrees else ERROR

    def in_words(self, setup: str) -> str:
        """What a scaled speed rests on, and whether memory was as predicted."""
        error = self.memory_error or 0
        memory = f"; memory: the peak of one was predicted {abs(error):.1%} too {'high' if error > 0 else 'low'}"
        return (
            f"{self.ratio:.2f} × what the card's rates say, from {self.counted} ({setup}; {SWITCH}=off leaves them "
            f"out): ±{ERROR:.0%} is what nine of ten published runs stayed within that others of their machine had "
            f"scaled{memory if abs(error) > _EXACT else ''}"
        )


def speed_setup(job: Job, kind: str) -> str:
    """What has to be the same for one run to say something of another, in words."""
    words = {
        job.engine.label: job.engine.label != "none",
        "compiled": job.fields.get("torch_compile"),
        "Liger kernels": job.fields.get("use_liger_kernel"),
        f"{job.world_size} × {job.device.label}": True,
        "calibrated": measured_on(job.device),  # the ratio is of other rates
    }
    return ", ".join([kind, job.method, *(word for word, said in words.items() if said)])


def own_runs(setup: str) -> OwnRuns | None:
    """The runs of a setup; None where there are none, or they are not asked for."""
    folder = _folder()
    reports = [report for report in _reports(folder) if report["speed"]["setup"] == setup] if folder else []
    if not reports:
        return None
    errors = [report.get("relative_error", {}).get("peak_allocated_bytes") for report in reports]
    known = [error for error in errors if isinstance(error, int | float) and abs(error) < math.inf]
    ratio = statistics.median(report["speed"]["ratio"] for report in reports)
    return OwnRuns(ratio, len(reports), max(known, key=abs, default=None))


def keep_run(report: Mapping[str, Any], output_dir: str) -> None:
    """Leave a run's figures for later predictions, where they say something of them."""
    folder = _folder()
    if folder is None or not (report.get("speed") or {}).get("ratio") or folder in Path(output_dir).resolve().parents:
        return
    try:
        _write(folder, f"{report['date'].replace(':', '')}-{os.getpid()}", report)
    except OSError as error:  # the run has ended well
        logger.warning("%s: this run's speed is not kept: %s", folder, one_line(error))


def learn_from_log(estimate: Estimate, samples: int, log: str) -> str:
    """Keep the speed of another Trainer's run of an estimated job, once; in words.

    Args:
        samples: of an optimizer step, over all devices.
        log: what transformers' Trainer printed, its trainer_state.json or all_results.json.

    Raises:
        InputError: it has no speed, or one that no card has, none is predicted, or no runs are asked for.
    """
    content, folder = read_bytes(user_path(log), _LARGEST_LOG, tail=True), _folder()
    if folder is None:
        raise InputError(f"--from-log {log}: {SWITCH} and {CALIBRATION} must not be off, or nothing is kept")
    if estimate.step_seconds is None or estimate.generation_share is not None:
        raise InputError(f"--from-log {log}: no speed is predicted for this job, or it rests on what is generated")
    if not (found := _LOGGED.findall(content)):
        raise InputError(f"{log} has no train_samples_per_second, which transformers' Trainer logs when it ends")
    seconds = samples / float(found[-1]) if float(found[-1]) else math.inf
    predicted = estimate.step_seconds * (estimate.own_runs.ratio if estimate.own_runs else 1)
    ratio = predicted / seconds
    if not _possible(ratio):
        raise InputError(f"{log}: {seconds:.3g} s a step, where {predicted:.3g} s are predicted, is of another job")
    name = f"{Path(log).stem[:60]}-{hashlib.sha256(content + estimate.speed_setup.encode()).hexdigest()[:12]}"
    _write(folder, name, {"speed": {"setup": estimate.speed_setup, "ratio": ratio}})
    return f"{log}: {seconds:.3g} s a step, {ratio:.2f} × the predicted speed: later answers of such jobs use it"


def _write(folder: Path, name: str, report: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{name}-{_NAME}", {key: report[key] for key in _KEPT if key in report})


def compared_speed(
    estimate: Estimate | None, steps: int, tokens: int, seconds: float, split: bool
) -> dict[str, Any] | None:
    """The speed of a run beside its prediction, for its report; None where none was predicted or measured.

    Args:
        estimate: of its longest samples.
        tokens, seconds: of all devices together in so many optimizer steps, without waiting for data.
        split: micro-batches ran in parts, whose speed says nothing of whole ones.
    """
    if not (estimate and estimate.tokens_per_second and tokens and seconds):
        return None
    predicted = estimate.tokens_per_second / (estimate.own_runs.ratio if estimate.own_runs else 1)
    whole = tokens / steps >= _SHORTEST * estimate.tokens_per_second * estimate.step_seconds
    speed = tokens / seconds
    generates = estimate.generation_share is not None  # completions, whose lengths nobody knows before
    says = steps >= _FEWEST_STEPS and whole and not split and not generates
    ratio = speed / predicted if says else None
    return {"setup": estimate.speed_setup, "tokens_per_second": speed, "predicted": predicted, "ratio": ratio}


def _folder() -> Path | None:
    """The folder of the runs, whole; None where they are not asked for."""
    asked = os.environ.get(SWITCH)
    if is_off(SWITCH) or is_off():
        return None
    return user_path(asked).resolve() if asked else cache_folder().resolve() / "runs"


@functools.cache
def _reports(folder: Path) -> list[dict[str, Any]]:
    """The reports that say something, cached: a process keeps its figures."""
    if os.environ.get(SWITCH) and not folder.is_dir():
        logger.warning("%s=%s is no folder: no runs count", SWITCH, folder)
    found = [path for path in folder.rglob(f"*{_NAME}") if path.is_file()]
    newest = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)[:_MOST]
    return [report for path in newest if (report := _readable(path))]


def _readable(path: Path) -> dict[str, Any] | None:
    """A report with a ratio that a device can have; None for another."""
    try:
        report = read_json(path)
    except InputError as error:
        logger.warning("%s: ignored", error)
        return None
    speed = report.get("speed")
    said = isinstance(speed, dict) and "setup" in speed and _possible(speed.get("ratio"))
    return report if said and isinstance(report.get("relative_error", {}), dict) else None


def _possible(ratio: Any) -> bool:
    row = MEASURABLE["step_time_ratio"]
    return isinstance(ratio, int | float) and row.lowest <= ratio <= row.highest
