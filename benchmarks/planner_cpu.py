"""The planner against real runs on the CPU: python benchmarks/planner_cpu.py

A number of bytes stands for the card. For every case (model, budget, length) every planned profile
that is said to fit really trains, evaluates, saves and resumes with an allocator that refuses what goes beyond the
budget. The choice that needs least is run with 2 % less than it is predicted to need, which must fail. All choices
are estimated, one by one, and the best of those that fit is compared with the one that the planner found: operations
of a step as torch's FlopCounterMode counts them.
"""

import tempfile
import time
import tomllib
from pathlib import Path
from unittest import mock

import torch
from jobs import make_trainer
from record import record_each
from torch.utils.flop_counter import FlopCounterMode

from hf_memopt import MemoryTrainer
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.ledger import Ledger
from hf_memopt.estimator.api import estimate_jobs
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choice_jobs import choice_job, start_search
from hf_memopt.planner.choices import memory_arguments
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.plan import plan
from hf_memopt.planner.search import summarize

JOBS = tomllib.loads((Path(__file__).parent / "data" / "planner_cpu.toml").read_text())
BATCH = 8
ROWS = 32
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}


class Budget(Ledger):
    """An allocator with an end: live bytes beyond the limit are refused as torch's own refuses them."""

    def __init__(self, limit: int | None = None):
        super().__init__()
        self.limit = limit

    def _allocate(self, key, size, kind):
        if self.limit is not None and self._total + size > self.limit:
            raise RuntimeError(f"DefaultCPUAllocator: can't allocate memory: you tried to allocate {size} bytes.")
        super()._allocate(key, size, kind)


def config_of(family: str, vocabulary: int):
    from transformers import AutoConfig

    return AutoConfig.for_model(
        family, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **JOBS["families"][family]
    )


def trainer_of(spec: JobSpec, choice, folder: str, steps: int, **more):
    """The MemoryTrainer that a choice describes, which does not recover: what does not fit fails."""
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    preset = choice.configured(spec.preset)
    fields = {**preset.settings(), **choice.fields(preset, spec.training), "max_steps": steps, **more}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(spec.config, dtype=getattr(torch, preset.dtype))
    if preset.method == "lora":
        model = get_peft_model(model, preset.peft_config())
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, spec.config.vocab_size, (ROWS, spec.seq_len), generator=generator).tolist()
    data = [{"input_ids": row, "labels": row} for row in ids]
    memory_args = memory_arguments(spec.memory_args, choice, oom_recovery=False)
    parts = {"eval_dataset": data[:BATCH], "memory_args": memory_args}
    return make_trainer(folder, model, fields, data, kind=MemoryTrainer, **parts)


def lived_through(spec: JobSpec, choice, limit: int | None) -> tuple[bool, int]:
    """Whether a choice trains, evaluates, saves and resumes within a limit, and the most bytes that were live."""
    with tempfile.TemporaryDirectory() as folder:
        peaks = []
        # Whose list of 32-bit weights outlives a job: weights of the next may have their ids.
        alone = mock.patch("bitsandbytes.optim.GlobalOptimManager._instance", None)
        try:
            for steps, resume in ((2, None), (4, True)):
                with alone, Budget(limit) as books:
                    trainer = trainer_of(spec, choice, folder, steps, save_strategy="steps", save_steps=2)
                    trainer.train(resume_from_checkpoint=resume)
                    del trainer
                peaks.append(max(peak.total for peak in books.peaks.values()))
        except RuntimeError as error:
            if "can't allocate memory" not in str(error):
                raise
            return False, max(peak.total for peak in books.peaks.values())
    return True, max(peaks)


def operations(spec: JobSpec, choice) -> int:
    """Of one optimizer step, as torch counts them."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(spec, choice, folder, 1, save_strategy="no", eval_strategy="no")
        with FlopCounterMode(display=False) as counted:
            trainer.train()
    return counted.get_total_flops()


def run(family: str, vocabulary: int, method: str, tokens: int, multiple: float) -> dict:
    """One case's row."""
    config = config_of(family, vocabulary)
    spec = JobSpec(
        model=config,
        config=config,
        preset=resolve_preset("cpu", method),
        method=method,
        memory=2**62,
        seq_len=tokens,
        effective_batch_size=BATCH,
        training=EVALUATED,
    )
    search = start_search(spec, lambda text: None)
    least = search.smallest()
    needed = search.estimates[least].device_bytes
    budget = int(needed * multiple)
    began = time.perf_counter()
    found = plan(config, "cpu", BATCH, tokens, method, memory=budget, training=EVALUATED)
    took = time.perf_counter() - began
    profiles, tried = [], {}
    for profile in found.profiles:
        if profile.choice not in tried:
            tried[profile.choice] = lived_through(spec, profile.choice, budget)
        survived, peak = tried[profile.choice]
        row = {"profile": profile.name, "settings": profile.summary}
        row |= {"predicted_bytes": profile.estimate.device_bytes, "room_bytes": int(budget * profile.share)}
        profiles.append(row | {"measured_bytes": peak, "survived": survived})
    under, _ = lived_through(spec, least, int(needed * 0.98))
    best, chosen = best_by_trying(spec, search, int(budget * found.profiles[-1].share)), found.profiles[-1].choice
    return {
        "family": family,
        "vocabulary": vocabulary,
        "method": method,
        "tokens": tokens,
        "budget_bytes": budget,
        "smallest_bytes": needed,
        "profiles": profiles,
        "under_the_smallest_fails": not under,
        "plan_seconds": round(took, 2),
        "choices": len(search.choices),
        "chosen": profiles[-1]["settings"],
        "best": summarize(best),
        "operations_chosen": operations(spec, chosen),
        "operations_best": operations(spec, best),
    }


def best_by_trying(spec: JobSpec, search, room: int):
    """The fastest, by the cost model, of all choices that are estimated to fit."""
    estimates = estimate_jobs([choice_job(spec, choice) for choice in search.choices], on_all_cores)
    fitting = [
        choice
        for choice, found in zip(search.choices, estimates, strict=True)
        if not isinstance(found, InputError) and found.device_bytes <= room
    ]
    return fitting[0]  # choices are sorted


if __name__ == "__main__":
    record_each("planner_cpu", run, JOBS["cases"])
