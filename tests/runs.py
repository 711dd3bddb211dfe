"""Folders as runs leave them, made by hand for the pages' tests."""

import json
from pathlib import Path

GIB = 2**30


def reading(step: int, phase: str = "train", allocated: float = 9.0, peak: float = 18.0, speed: float | None = 1000.0):
    """A line of memory_log.jsonl; sizes in GiB."""
    line = {
        "step": step,
        "phase": phase,
        "time": 1000.0 + step,
        "allocated": int(allocated * GIB),
        "reserved": int(peak * GIB),
        "peak_allocated": int(peak * GIB),
        "peak_reserved": int(peak * GIB),
        "used": int(peak * GIB),
        "capacity": 24 * GIB,
        "retries": 0,
        "host_resident": GIB,
        "host_available": 8 * GIB,
        "free": int((24 - peak) * GIB),
        "status": "normal",
    }
    return line | ({"tokens_per_second": speed} if speed else {})


def write_run(folder: Path, report: dict | None = None, readings: list[dict] | None = None, ended: dict | None = None):
    """A run's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    if report is not None:
        (folder / "memory_report.json").write_text(json.dumps(report))
    if readings is not None:
        (folder / "memory_log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in readings))
    if ended is not None:
        (folder / "oom_report.json").write_text(json.dumps(ended))
    return folder


RECOVERED = {
    "event": "oom_recovered",
    "step": 3,
    "stage": "backward",
    "cause": "device memory ran out",
    "message": "CUDA out of memory. Tried to allocate 1.96 GiB.",
    "micro_batch_before": 8,
    "micro_batch_after": 4,
    "shapes": {"input_ids": [8, 1024]},
    "dataset_indices": [4, 5, 6],
}
ENDED = {
    "event": "out_of_memory",
    "step": 7,
    "stage": "forward",
    "kind": "device",
    "cause": "device memory ran out",
    "reason": "it fitted for 7 steps, and this batch is larger than all before it: memory is as the data are",
    "message": "CUDA out of memory.",
    "why_not_smaller": "the micro-batch is one sample",
    "shapes": {"input_ids": [1, 9000]},
    "dataset_indices": [12],
    "held_bytes": {"parameters": GIB},
    "predicted_breakdown": {"parameters": GIB, "logits": 2 * GIB},
    "next": [{"change": "loss_chunk_size=512", "saved_bytes": 3 * GIB}],
    "checkpoint": "out/checkpoint-7",
}


def report(**more) -> dict:
    """memory_report.json of a run on a card (made up: no card is here)."""
    return {
        "date": "2026-11-21T00:00:00+00:00",
        "model": "a/model",
        "preset": "rtx_4090",
        "method": "lora",
        "strategy": "none",
        "hardware": {"label": "NVIDIA GeForce RTX 4090", "memory_bytes": 24 * GIB, "devices": 2},
        "versions": {"torch": "2.13.0"},
        "global_step": 40,
        "held_out_loss": {"0": 3.0, "40": 1.5},
        "settings": {"per_device_train_batch_size": 8, "optim": "adamw_torch", "output_dir": "x"},
        "estimate": {
            "peak_allocated_bytes": 18 * GIB,
            "phase": "backward",
            "notes": ["a note <b>"],
            "breakdown": {"parameters": 2 * GIB, "activations": 16 * GIB},
            "phases": {"load": GIB, "forward": 17 * GIB, "backward": 18 * GIB},
        },
        "predicted_timeline": [["load", GIB], ["forward", 17 * GIB], ["backward", 18 * GIB]],
        "measured": {
            "peak_allocated_bytes": 18 * GIB,
            "peak_reserved_bytes": 19 * GIB,
            "phases": {"backward": 18 * GIB},
        },
        "events": [RECOVERED],
    } | more
