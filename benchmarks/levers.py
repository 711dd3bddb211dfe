"""What each lever saves and costs: python benchmarks/levers.py

One model of 24 million weights, 1024 tokens, the same batches for all; every lever against the same baseline (plain
fp32 training with fused AdamW). Peaks are the allocator's over two steps of a real trainer. Times are of whole steps,
baseline and lever taking turns in one process. The gradient is compared after one backward pass from the same weights.
On CUDA the same is measured with the card's own counters.
"""

import statistics
import tempfile
import time

import torch
from record import record
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_memopt import MemoryArguments, MemoryTrainer, estimate
from hf_memopt.estimator.truth import allocator_peak

VOCABULARY, LENGTH, ROWS, TURNS = 16_000, 1024, 2, 7
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
HALF = {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}}
# name -> (TrainingArguments fields, MemoryArguments fields)
LEVERS = {
    "baseline": ({}, {}),
    "activation_checkpointing, every layer": (CHECKPOINTED, {}),
    "activation_checkpointing, every second layer": (HALF, {}),
    "bf16": ({"bf16": True}, {}),
    "optim=adamw_8bit": ({"optim": "adamw_8bit"}, {}),
    "optim=adafactor": ({"optim": "adafactor"}, {}),
    "loss_chunk_size=128": ({}, {"loss_chunk_size": 128}),
    "loss_chunk_size=128 and activation_checkpointing": (CHECKPOINTED, {"loss_chunk_size": 128}),
}


def config() -> LlamaConfig:
    return LlamaConfig(vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=8,
                       num_attention_heads=6, max_position_embeddings=LENGTH, tie_word_embeddings=False)  # fmt: skip


def trainer_of(fields: dict, memory: dict, folder: str) -> Trainer:
    torch.manual_seed(0)
    settings = {"per_device_train_batch_size": ROWS, "max_steps": 2, "report_to": "none", "disable_tqdm": True,
                "logging_strategy": "no", "save_strategy": "no", "use_cpu": not torch.cuda.is_available()}  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, VOCABULARY, (ROWS * 4, LENGTH))]
    given = {
        "model": LlamaForCausalLM(config()), "args": TrainingArguments(folder, **settings, **fields),
        "train_dataset": rows, "data_collator": default_data_collator,
    }  # fmt: skip
    return MemoryTrainer(**given, memory_args=MemoryArguments(**memory)) if memory else Trainer(**given)


def peak_of(fields: dict, memory: dict) -> int:
    """Bytes: the allocator's peak over two steps, the model included."""
    with tempfile.TemporaryDirectory() as folder:
        if not torch.cuda.is_available():
            return allocator_peak(lambda: trainer_of(fields, memory, folder).train())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer_of(fields, memory, folder).train()
        return torch.cuda.max_memory_allocated()


class Stepper:
    """A trainer that is ready to take steps one by one."""

    def __init__(self, fields: dict, memory: dict) -> None:
        self.trainer = trainer_of(fields, memory, tempfile.mkdtemp())
        self.trainer.train()  # states are made, everything is warm
        self.model = self.trainer.model_wrapped
        self.batch = default_data_collator([self.trainer.train_dataset[index] for index in range(ROWS)])

    def gradient(self) -> torch.Tensor:
        """Of one batch, all weights in one vector."""
        self.model.zero_grad()
        trainer = self.trainer
        items = trainer._get_num_items_in_batch([self.batch], trainer.args.device)
        Trainer.training_step(trainer, self.model, dict(self.batch), items)
        return torch.cat([weight.grad.flatten() for weight in self.model.parameters()])

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        items = self.trainer._get_num_items_in_batch([self.batch], self.trainer.args.device)
        Trainer.training_step(self.trainer, self.model, dict(self.batch), items)
        self.trainer._clip_grad_norm(self.model)
        self.trainer.optimizer.step()
        self.model.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began


def row_of(name: str, baseline: Stepper, baseline_peak: int) -> dict:
    fields, memory = LEVERS[name]
    peak = peak_of(fields, memory)
    device = "auto" if torch.cuda.is_available() else "cpu"
    predicted = estimate(config(), {"per_device_train_batch_size": ROWS, **fields}, LENGTH, device,
                         memory_args=MemoryArguments(**memory)).peak_allocated_bytes  # fmt: skip
    lever = Stepper(fields, memory)
    with torch.no_grad():
        for ours, plain in zip(lever.trainer.model.parameters(), baseline.trainer.model.parameters(), strict=True):
            ours.copy_(plain)
    wanted, found = baseline.gradient(), lever.gradient()
    ratios = []
    for turn in range(TURNS):
        pair = [baseline, lever] if turn % 2 else [lever, baseline]
        seconds = {id(stepper): stepper.step() for stepper in pair}
        ratios.append(seconds[id(lever)] / seconds[id(baseline)])
    return {
        "lever": name, "peak_bytes": peak, "saved_bytes": baseline_peak - peak,
        "peak_ratio": round(peak / baseline_peak, 4), "predicted_error": round(predicted / peak - 1, 5),
        "step_time_ratio": round(statistics.median(ratios), 3),
        "gradient_error": float(((found - wanted).norm() / wanted.norm()).item()),
    }  # fmt: skip


def main() -> None:
    baseline_peak = peak_of(*LEVERS["baseline"])
    rows = []
    for name in track(LEVERS, description="levers"):
        rows.append(row_of(name, Stepper(*LEVERS["baseline"]), baseline_peak))
    for row in rows:
        print(f"{row['lever']:>50}: {row['peak_ratio']:6.1%} of the peak, {row['step_time_ratio']:.2f} of the time, "
              f"gradient {row['gradient_error']:.1e}, predicted {row['predicted_error']:+.2%}")  # fmt: skip
    record("levers", "python benchmarks/levers.py", rows)


if __name__ == "__main__":
    main()
