"""What each lever saves and costs: python benchmarks/levers.py

One model of 24 million weights, 1024 tokens, the same batches for all; every lever against the same baseline (plain
fp32 training with fused AdamW). Peaks are the allocator's over two steps of a real trainer. Times are of whole steps,
baseline and lever taking turns in one process. The gradient is compared after one backward pass from the same weights.
The held-out loss is that of the embedded pretraining job after 60 steps, against the same job without the lever. On
CUDA the same is measured with the card's own counters.
"""

import functools
import json
import statistics
import sys
import tempfile
import time

import embedded_run
import torch
from record import RESULTS, record
from rich.progress import track
from transformers import MistralConfig, MistralForCausalLM, Trainer, TrainingArguments, default_data_collator

from hf_memopt import MemoryArguments, MemoryTrainer, estimate
from hf_memopt.estimator.accounting.profiled_peak import allocator_peak

VOCABULARY, LENGTH, ROWS, TURNS = 16_000, 1024, 2, 7
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
EAGER = "attn_implementation=eager, beside which guides state sparse attention's savings"
PROMPTS = "three quarters of every sample are a prompt without labels"
# name -> (TrainingArguments fields, MemoryArguments fields); the last ones on data of their own
LEVERS = {
    "baseline": ({}, {}),
    "activation_checkpointing (checkpoint_ratio=1)": (CHECKPOINTED, {}),
    "checkpoint_ratio=0.5": ({}, {"checkpoint_ratio": 0.5}),
    "checkpoint_keeps=attention": ({}, {"checkpoint_keeps": "attention"}),
    "checkpoint_keeps=matmuls": ({}, {"checkpoint_keeps": "matmuls"}),
    "activation_compression=int8": ({}, {"activation_compression": "int8"}),
    "activation_compression=int8, activation_checkpointing": (CHECKPOINTED, {"activation_compression": "int8"}),
    "bf16": ({"bf16": True}, {}),
    "bf16, activation_compression=int8": ({"bf16": True}, {"activation_compression": "int8"}),
    "optim=adamw_8bit": ({"optim": "adamw_8bit"}, {}),
    "optim=adafactor": ({"optim": "adafactor"}, {}),
    "adam_mini": ({}, {"adam_mini": True}),
    "optimizer_in_backward": ({"max_grad_norm": 0.0}, {"optimizer_in_backward": True}),
    "loss_chunk_size=128": ({}, {"loss_chunk_size": 128}),
    "loss_chunk_size=128, activation_checkpointing": (CHECKPOINTED, {"loss_chunk_size": 128}),
    "loss_chunk_size=128, activation_checkpointing, activation_compression=int8, adamw_8bit": (
        {**CHECKPOINTED, "optim": "adamw_8bit"},
        {"loss_chunk_size": 128, "activation_compression": "int8"},
    ),
    "optimizer_in_backward, loss_chunk_size=128, activation_checkpointing": (
        {**CHECKPOINTED, "max_grad_norm": 0.0},
        {"loss_chunk_size": 128, "optimizer_in_backward": True},
    ),
    "mlp_tile_size=512": ({}, {"mlp_tile_size": 512}),
    "mlp_tile_size=512, activation_checkpointing": (CHECKPOINTED, {"mlp_tile_size": 512}),
    "mlp_tile_size=512, loss_chunk_size=128, activation_checkpointing": (
        CHECKPOINTED,
        {"mlp_tile_size": 512, "loss_chunk_size": 128},
    ),
    "sliding_window=256": ({}, {"sliding_window": 256}),
    "sparse_block_size=64": ({}, {"sparse_block_size": 64}),
    EAGER: ({}, {}),
    f"baseline, {PROMPTS}": ({}, {}),
    f"logits_to_keep, {PROMPTS}": ({}, {"logits_to_keep": True}),
    f"loss_chunk_size=128, {PROMPTS}": ({}, {"loss_chunk_size": 128}),
}
if torch.cuda.is_available():
    LEVERS["activation_offload"] = ({}, {"activation_offload": True})
    LEVERS["activation_offload, activation_checkpointing"] = (CHECKPOINTED, {"activation_offload": True})
    theirs = {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True}}
    LEVERS["activation_checkpointing, transformers' own offload"] = (theirs, {})
ANOTHER_FUNCTION = ("sliding_window", "sparse_block_size")  # whose gradient is that of another model
NO_GRADIENT = ("optimizer_in_backward",)  # which is gone after backward


def config(name: str = "") -> MistralConfig:
    attention = "eager" if name == EAGER else "sdpa"
    return MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=LENGTH,
        sliding_window=None,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )


def rows(prompts: bool) -> list[dict]:
    ids = torch.randint(0, VOCABULARY, (ROWS * 4, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    if prompts:
        labels[:, : LENGTH * 3 // 4] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trainer_of(name: str, folder: str) -> Trainer:
    fields, memory = LEVERS[name]
    torch.manual_seed(0)
    settings = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 2,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "save_strategy": "no",
        "use_cpu": not torch.cuda.is_available(),
    }
    given = {
        "model": MistralForCausalLM(config(name)),
        "args": TrainingArguments(folder, **settings, **fields),
        "train_dataset": rows(PROMPTS in name),
        "data_collator": default_data_collator,
    }
    return MemoryTrainer(**given, memory_args=MemoryArguments(**memory)) if memory else Trainer(**given)


@functools.cache
def peak_of(name: str) -> int:
    """Bytes: the allocator's peak over two steps, the model included."""
    with tempfile.TemporaryDirectory() as folder:
        if not torch.cuda.is_available():
            return allocator_peak(lambda: trainer_of(name, folder).train())
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        trainer_of(name, folder).train()
        return torch.cuda.max_memory_allocated()


class Stepper:
    """A trainer that is ready to take steps one by one."""

    def __init__(self, name: str) -> None:
        self.trainer = trainer_of(name, tempfile.mkdtemp())
        self.trainer.train()  # states are made, everything is warm
        self.model = self.trainer.model_wrapped
        self.batch = default_data_collator([self.trainer.train_dataset[index] for index in range(ROWS)])

    def backward(self) -> None:
        """Forward and backward of one batch."""
        items = self.trainer._get_num_items_in_batch([self.batch], self.trainer.args.device)
        Trainer.training_step(self.trainer, self.model, dict(self.batch), items)

    def gradient(self) -> torch.Tensor:
        """Of one batch, all weights in one vector."""
        self.model.zero_grad()
        self.backward()
        return torch.cat([weight.grad.flatten() for weight in self.model.parameters()])

    def step(self) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        self.backward()
        if self.trainer.args.max_grad_norm:
            self.trainer._clip_grad_norm(self.model)
        self.trainer.optimizer.step()
        self.model.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began


def compared(lever: Stepper, baseline: Stepper) -> dict:
    """The lever's gradient beside the baseline's, from the same weights."""
    with torch.no_grad():
        for ours, plain in zip(lever.trainer.model.parameters(), baseline.trainer.model.parameters(), strict=True):
            ours.copy_(plain)
    wanted, found = baseline.gradient().double(), lever.gradient().double()
    return {
        "gradient_error": float((found - wanted).norm() / wanted.norm()),
        "gradient_cosine": float(torch.nn.functional.cosine_similarity(found, wanted, dim=0)),
    }


@functools.cache
def held_out_loss(name: str) -> float:
    fields, memory = LEVERS[name]
    return embedded_run.train(fields, memory)[1]


def row_of(name: str) -> dict:
    fields, memory = LEVERS[name]
    plain = f"baseline, {PROMPTS}" if PROMPTS in name else "baseline"
    peak, baseline_peak = peak_of(name), peak_of(plain)
    device = "auto" if torch.cuda.is_available() else "cpu"
    predicted = estimate(
        config(),
        {"per_device_train_batch_size": ROWS, **fields},
        LENGTH,
        device,
        attn_implementation=config(name)._attn_implementation,
        memory_args=MemoryArguments(**memory),
    ).peak_allocated_bytes
    baseline, lever = Stepper(plain), Stepper(name)
    row = {
        "lever": name,
        "peak_bytes": peak,
        "saved_bytes": baseline_peak - peak,
        "peak_ratio": round(peak / baseline_peak, 4),
        "predicted_error": round(predicted / peak - 1, 5),
    }
    if not name.startswith((*ANOTHER_FUNCTION, *NO_GRADIENT)):
        row |= compared(lever, baseline)
    ratios = []
    for turn in range(TURNS):
        pair = [baseline, lever] if turn % 2 else [lever, baseline]
        seconds = {id(stepper): stepper.step() for stepper in pair}
        ratios.append(seconds[id(lever)] / seconds[id(baseline)])
    row["step_time_ratio"] = round(statistics.median(ratios), 3)
    if PROMPTS not in name and name != EAGER and not name.startswith(ANOTHER_FUNCTION):
        row["held_out_loss_ratio"] = round(held_out_loss(name) / held_out_loss("baseline"), 5)
    return row


def main(chosen: list[str]) -> None:
    """All levers, or those that are named, whose rows then take the place of older ones."""
    found = [row_of(name) for name in track(chosen or LEVERS, description="levers")]
    for row in found:
        print(
            f"{row['lever']:>60}: {row['peak_ratio']:6.1%} of the peak, {row['step_time_ratio']:.2f} of the time, "
            f"gradient {row.get('gradient_error', float('nan')):.1e}, held-out loss "
            f"{row.get('held_out_loss_ratio', float('nan')):.4f}, "
            f"predicted {row['predicted_error']:+.2%}"
        )
    if chosen:
        older = json.loads((RESULTS / "levers.json").read_text())["rows"]
        rows = {row["lever"]: row for row in (*older, *found)}
        found = [rows[name] for name in LEVERS if name in rows]
    record("levers", "python benchmarks/levers.py", found)


if __name__ == "__main__":
    main(sys.argv[1:])
