"""One rank's share of a comparison: started by accelerate launch, it trains a small job and writes its true peaks.

Used by estimator_cpu.py and the tests; JOB.json describes the job, PEAK.json is where rank 0 writes two numbers of
bytes: `tensors`, every live tensor of the process, and `allocator`, which has gloo's own staging copies on top. Those
are made in gloo's threads, differ from run to run, and are not made by accelerators' libraries.
"""

import json
import sys
import tempfile
from pathlib import Path

from jobs import QUIET, same_rows


def main(job_file: str, peak_file: str) -> None:
    job = json.loads(Path(job_file).read_text())

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hf_memopt import MemoryArguments, MemoryTrainer
    from hf_memopt.estimator.accounting.ledger import Ledger
    from hf_memopt.estimator.accounting.profiled_peak import allocator_peak

    config = AutoConfig.for_model(**job["config"])
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, **{**QUIET, **job["fields"]})

        def train() -> None:
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, job["dtype"]))
            rows = same_rows(job["seq_len"], 64)
            given = {"model": model, "args": args, "train_dataset": rows, "data_collator": default_data_collator}
            memory = job.get("memory")
            trainer = MemoryTrainer(**given, memory_args=MemoryArguments(**memory)) if memory else Trainer(**given)
            trainer.train()

        with Ledger() as ledger:
            allocator = allocator_peak(train)
    tensors = max(peak.total for peak in ledger.peaks.values())
    if args.process_index == 0:
        Path(peak_file).write_text(json.dumps({"tensors": tensors, "allocator": allocator}))


if __name__ == "__main__":
    from hf_memopt.program import run

    run(lambda: main(*sys.argv[1:]))
