"""Part 4: a card that is really too small or fragmented, and what MemoryTrainer costs where nothing runs out.

That it recovers in every phase: pytest -m cuda.
"""

import statistics
import tempfile
import time
from typing import Any

from benchmarks.gpu.case import Case
from hf_memopt.contrib.calibration.training import Setting, make_trainer, release, step_clock

MODEL = Setting(
    "oom", "smollm2-135m", {"gradient_accumulation_steps": 2, "learning_rate": 1e-3}, {}, micro=4, length=256
)
STEPS = 3
OVERHEADS = {"0.1B": "smollm2-135m", "0.5B": "qwen2.5-0.5b"}


def cases(rehearse: bool) -> list[Case]:
    """A card that is really too small, a fragmented one, and the time of a step."""
    made = [Case("oom", "card too small", 16), Case("oom", "fragmented", 60)]
    made += [
        Case("oom", f"step time {name}", 11 + number, {"model": model})
        for number, (name, model) in enumerate(OVERHEADS.items())
    ]
    return [Case(case.part, case.name, case.worth, case.settings, rehearse=rehearse) for case in made]


def measure(case: Case) -> dict:
    """By the case's name."""
    setting = MODEL.rehearsed() if case.rehearse else MODEL
    if case.name.startswith("step time"):
        return step_time(case)
    if case.name == "card too small":
        return too_small(setting)
    return fragmented(setting)


def run(setting: Setting) -> tuple[dict, Any, float]:
    """Train; the weights, the trainer and the seconds."""
    with tempfile.TemporaryDirectory() as folder:
        fields = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = make_trainer(setting, folder, STEPS, **fields)
        began = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - began
        weights = {name: weight.detach().float().cpu() for name, weight in trainer.model.named_parameters()}
    return weights, trainer, seconds


def distance(one: dict, other: dict) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max().clamp(min=1e-12)) for name in one)


def too_small(setting: Setting) -> dict:
    """A limit between what half a micro-batch needs and what a whole one does, from the first step on."""
    import dataclasses

    import torch

    plain, _, seconds = run(setting)
    if not torch.cuda.is_available():
        return {"weights_error": distance(plain, run(setting)[0]), "limit_bytes": None, "micro_batch": setting.micro}
    whole = torch.cuda.max_memory_reserved()
    release()
    run(dataclasses.replace(setting, micro=setting.micro // 2))
    limit = (whole + torch.cuda.max_memory_reserved()) // 2
    release()
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    weights, trainer, limited_seconds = run(setting)
    return {
        "limit_bytes": limit,
        "whole_bytes": whole,
        "weights_error": distance(plain, weights),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "ooms": torch.cuda.memory_stats()["num_ooms"],
        "seconds": round(seconds, 3),
        "limited_seconds": round(limited_seconds, 3),
        "micro_batch": trainer.args.per_device_train_batch_size,
    }


def fragmented(setting: Setting) -> dict:
    """Free memory in holes between blocks that stay: the allocator's cache cannot serve a large request."""
    import torch

    if torch.cuda.is_available():
        blocks = [torch.empty(24 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(256)]
        kept = blocks[::2]
        del blocks
        stats = torch.cuda.memory_stats()
        limit = torch.cuda.memory_reserved() + 2**29
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
        run(setting)
        later = torch.cuda.memory_stats()
        return {
            "blocks_kept": len(kept),
            "inactive_split_bytes": stats["inactive_split_bytes.all.current"],
            "retries": later["num_alloc_retries"],
            "ooms": later["num_ooms"],
        }
    run(setting)
    return {"blocks_kept": 0, "inactive_split_bytes": 0, "retries": 0, "ooms": 0}


def step_time(case: Case) -> dict:
    """MemoryTrainer's step beside Trainer's, the two in turn."""
    from transformers import Trainer

    from hf_memopt import MemoryTrainer

    # No synchronization but the clock's own at both ends of a step, which both have.
    setting = Setting("oom", case.settings["model"], {"bf16": True, "gradient_accumulation_steps": 2}, None, micro=4)
    setting = setting.rehearsed() if case.rehearse else setting
    rounds, steps = (1, 4) if case.rehearse else (3, 16)
    times = {"Trainer": [], "MemoryTrainer": []}
    for _ in range(rounds):
        for kind in (Trainer, MemoryTrainer):
            clock = step_clock()
            with tempfile.TemporaryDirectory() as folder:
                make_trainer(setting, folder, steps, kind, [clock]).train()
            times[kind.__name__] += clock.seconds[steps // 4 :]
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {"step_time_ratio": round(medians["MemoryTrainer"] / medians["Trainer"], 4), "median_step_s": medians}
