"""What MemoryTrainer costs beside the plain Trainer: python benchmarks/trainer_overhead.py

Both train the same model of 20 million weights on the same batches, in one process and taking turns: a step of one,
then a step of the other. Reported: the median of the ratios of neighbouring steps, and the most that the CPU's
allocator held for each.
"""

import json
import statistics
import tempfile
import threading
import time

import torch
from jobs import make_trainer
from record import record
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

from hf_memopt import MemoryTrainer

STEPS, LEFT_OUT, LENGTH, ROWS = 150, 10, 128, 4


def trainer_of(kind, folder: str, steps: int) -> Trainer:
    torch.manual_seed(0)
    sizes = {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 5}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, tie_word_embeddings=True))
    fields = {"max_steps": steps, "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": 2}
    fields |= {"logging_strategy": "steps", "logging_steps": 1}
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 8000, (ROWS * 40, LENGTH))]
    return make_trainer(folder, model, fields, rows, kind=kind)


class Turns(TrainerCallback):
    """Ends a turn when everything of a step has been done, its logging too, and waits for the next one."""

    def __init__(self, mine: threading.Semaphore, others: threading.Semaphore) -> None:
        self.mine, self.others, self.seconds = mine, others, []
        self.began = None

    def on_log(self, args, state, control, **kwargs):
        if self.began is not None:
            self.seconds.append(time.perf_counter() - self.began)
        self.others.release()
        self.mine.acquire()
        self.began = time.perf_counter()

    def on_train_end(self, args, state, control, **kwargs):
        self.others.release()


def step_times() -> dict[str, list[float]]:
    """Seconds of every step of each, the two in turn."""
    batons = threading.Semaphore(0), threading.Semaphore(0)
    clocks, threads = {}, []
    for number, kind in enumerate((Trainer, MemoryTrainer)):
        trainer = trainer_of(kind, tempfile.mkdtemp(), STEPS)
        clock = clocks[kind.__name__] = Turns(batons[number], batons[1 - number])
        trainer.add_callback(clock)
        threads.append(threading.Thread(target=_train, args=(trainer, batons[number])))
    for thread in threads:
        thread.start()
    batons[0].release()
    for thread in threads:
        thread.join()
    return {name: clock.seconds[LEFT_OUT:] for name, clock in clocks.items()}


def _train(trainer: Trainer, baton: threading.Semaphore) -> None:
    baton.acquire()
    trainer.train()


def peak_of(kind) -> int:
    """Bytes: the most that the CPU's allocator held while one of the two trained."""
    from profiled_peak import allocator_peak

    with tempfile.TemporaryDirectory() as folder:
        return allocator_peak(lambda: trainer_of(kind, folder, 6).train())


def main() -> None:
    times = step_times()
    ratios = [ours / plain for ours, plain in zip(times["MemoryTrainer"], times["Trainer"], strict=False)]
    peaks = {kind.__name__: peak_of(kind) for kind in (Trainer, MemoryTrainer)}
    model = trainer_of(Trainer, tempfile.mkdtemp(), 1).model
    quarters = statistics.quantiles(ratios, n=4)
    row = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "steps_each": len(ratios),
        "step_time_ratio_median": round(quarters[1], 4),
        "step_time_ratio_quartiles": [round(quarters[0], 4), round(quarters[2], 4)],
        "median_step_s": {name: round(statistics.median(seconds), 4) for name, seconds in times.items()},
        "peak_ratio": round(peaks["MemoryTrainer"] / peaks["Trainer"], 4),
        "peak_allocated_bytes": peaks,
    }
    print(json.dumps(row, indent=2))
    record("trainer_overhead", [row])


if __name__ == "__main__":
    main()
