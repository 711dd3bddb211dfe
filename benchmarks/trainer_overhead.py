"""What MemoryTrainer costs beside the plain Trainer: python benchmarks/trainer_overhead.py

Both train the same model of 20 million weights on the same batches, a few steps of one and then of the other, many
times in one process. Reported: the median of the ratios of neighbouring pairs, and the most that the CPU's allocator
held for each.
"""

import json
import statistics
import tempfile
import time
from itertools import pairwise

import torch
from record import record

PAIRS, STEPS, LENGTH, ROWS = 30, 10, 128, 4


def trainer_of(kind, folder: str):
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8000, hidden_size=512, intermediate_size=1408, num_hidden_layers=5,
                         num_attention_heads=8, tie_word_embeddings=True)  # fmt: skip
    args = TrainingArguments(
        folder, use_cpu=True, max_steps=STEPS, per_device_train_batch_size=ROWS, gradient_accumulation_steps=2,
        report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8000, (ROWS * 2 * STEPS, LENGTH))]
    return kind(model=LlamaForCausalLM(config), args=args, train_dataset=rows)


def step_times(kind) -> list[float]:
    """Seconds of each step of a short run but the first two, from one's log to the next one's."""
    from transformers import TrainerCallback

    timed = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(kind, folder)

        class Clock(TrainerCallback):
            def on_log(self, args, state, control, **kwargs):
                timed.append(time.perf_counter())

        trainer.add_callback(Clock())  # after the memory callback, so that its work is in the time
        trainer.train()
    return [after - before for before, after in pairwise(timed)][1:]


def peak_of(kind) -> int:
    """Bytes: the most that the CPU's allocator held while one of the two trained."""
    from hf_memopt.estimator.truth import allocator_peak

    with tempfile.TemporaryDirectory() as folder:
        return allocator_peak(lambda: trainer_of(kind, folder).train())


def main() -> None:
    from transformers import Trainer

    from hf_memopt import MemoryTrainer

    for kind in (Trainer, MemoryTrainer):  # warm up
        step_times(kind)
    times = {"Trainer": [], "MemoryTrainer": []}
    pairs = []
    for number in range(PAIRS):
        order = (Trainer, MemoryTrainer) if number % 2 else (MemoryTrainer, Trainer)
        found = {kind.__name__: step_times(kind) for kind in order}
        for name, seconds in found.items():
            times[name] += seconds
        pairs.append(statistics.median(found["MemoryTrainer"]) / statistics.median(found["Trainer"]))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    peaks = {kind.__name__: peak_of(kind) for kind in (Trainer, MemoryTrainer)}
    parameters = sum(weight.numel() for weight in trainer_of(Trainer, tempfile.mkdtemp()).model.parameters())
    row = {
        "parameters": parameters, "pairs": PAIRS, "steps_each": len(times["Trainer"]),
        "step_time_ratio_median": round(statistics.median(pairs), 4),
        "ratio_of_median_step_times": round(medians["MemoryTrainer"] / medians["Trainer"], 4),
        "step_time_ratios": [round(ratio, 4) for ratio in sorted(pairs)],
        "peak_ratio": round(peaks["MemoryTrainer"] / peaks["Trainer"], 4), "peak_allocated_bytes": peaks,
    }  # fmt: skip
    print(json.dumps(row, indent=2))
    record("trainer_overhead", "python benchmarks/trainer_overhead.py", [row])


if __name__ == "__main__":
    main()
