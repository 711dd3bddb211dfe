"""What each lever saves and costs: python benchmarks/levers.py

One model of 24 million weights, 1024 tokens, the same batches for all; every lever against the same baseline (plain
fp32 training with fused AdamW). Peaks are the allocator's over two steps of a real trainer. Times are of whole steps,
baseline and lever taking turns in one process. The gradient is compared after one backward pass from the same weights.
The held-out loss is that of the embedded pretraining job after 60 steps, against the same job without the lever. On
CUDA the same is measured with the card's own counters.

Levers for frozen weights are compared with LoRA, and with QLoRA of a mixture of experts. Streamed weights are in host
memory anyway on a CPU: there, memory beside the allocator's stands in for the host's, and copies do not overlap.
"""

import dataclasses
import functools
import json
import statistics
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import embedded_run
import torch
from jobs import four_bits, loaded_bytes, make_trainer, with_checkpointing
from jobs import lora as lora_config
from profiled_peak import allocator_peak
from record import RESULTS, record
from rich.progress import track
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Trainer,
    default_data_collator,
)

from hf_memopt import MemoryArguments, estimate
from hf_memopt.estimator.api import run_trace
from hf_memopt.estimator.job import describe
from hf_memopt.levers import weight_streaming
from hf_memopt.levers.adapters import add_adapters
from hf_memopt.levers.expert_loading import experts_quantized_on_load

VOCABULARY, LENGTH, ROWS, TURNS = 16_000, 1024, 2, 7
EAGER = "attn_implementation=eager, beside which guides state sparse attention's savings"
PROMPTS = "three quarters of every sample are a prompt without labels"
LORA = "LoRA of all linear layers"
EXPERTS = "QLoRA beside a mixture of experts"
JOBS = (PROMPTS, LORA, EXPERTS)  # with a baseline of their own
FROZEN = (LORA, EXPERTS)
DATA = tomllib.loads((Path(__file__).parent / "data" / "levers.toml").read_text())
# name -> (TrainingArguments fields, MemoryArguments fields)
LEVERS = {
    name: (with_checkpointing(lever.get("fields", {})), lever.get("memory", {}))
    for name, lever in (DATA["everywhere"] | (DATA["card"] if torch.cuda.is_available() else {})).items()
}
ANOTHER_FUNCTION = ("sliding_window", "sparse_block_size")  # whose gradient is that of another model
NO_GRADIENT = ("optimizer_in_backward",)  # which is gone after backward


class HostLanes(weight_streaming.LanesAtOnce):
    """Copies at once, to memory that the allocator does not count: it stands in for the host's."""

    def buffer(self, size: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(size), dtype=torch.uint8)


def config(name: str = "") -> PreTrainedConfig:
    sizes = {
        **{"vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
        **{"num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": LENGTH},
        **{"sliding_window": None, "tie_word_embeddings": False},
        "attn_implementation": "eager" if name == EAGER else "sdpa",
    }
    if EXPERTS in name:
        experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "head_dim": 64}
        return Qwen3MoeConfig(**sizes, **experts)
    return MistralConfig(**sizes)


def lora(name: str):
    linear = ["q_proj", "k_proj", "v_proj", "o_proj"] if EXPERTS in name else "all-linear"
    return lora_config(target_modules=linear) if name.endswith(FROZEN) else None


def quantization_of(name: str) -> BitsAndBytesConfig | None:
    return four_bits(compute="float32") if EXPERTS in name else None


def model_of(name: str, folder: str):
    torch.manual_seed(0)
    if not name.endswith(FROZEN):
        return MistralForCausalLM(config(name))
    model = AutoModelForCausalLM.from_config(config(name))
    if quantization := quantization_of(name):
        model.save_pretrained(folder)
        with experts_quantized_on_load(MemoryArguments(**LEVERS[name][1]), quantization, lora(name)):
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=quantization)
    torch.manual_seed(0)
    return add_adapters(model, lora(name))


def rows(prompts: bool) -> list[dict]:
    ids = torch.randint(0, VOCABULARY, (ROWS * 4, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    if prompts:
        labels[:, : LENGTH * 3 // 4] = -100
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def trainer_of(name: str, folder: str) -> Trainer:
    fields, memory = LEVERS[name]
    settings = {"per_device_train_batch_size": ROWS, "use_cpu": not torch.cuda.is_available(), **fields}
    return make_trainer(folder, model_of(name, folder), settings, rows(PROMPTS in name), memory or None)


@functools.cache
def peak_of(name: str) -> int:
    """Bytes: the allocator's peak over two steps, the model included; where weights are frozen, without loading."""
    with tempfile.TemporaryDirectory() as folder:
        if not torch.cuda.is_available():
            if not name.endswith(FROZEN):
                return allocator_peak(lambda: trainer_of(name, folder).train())
            trainer = trainer_of(name, folder)
            return loaded_bytes(trainer.model) + allocator_peak(trainer.train)
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
        """Of one batch, all trained weights in one vector."""
        self.model.zero_grad()
        self.backward()
        return torch.cat([weight.grad.flatten() for weight in self.trained()])

    def trained(self) -> list[torch.nn.Parameter]:
        return [weight for weight in self.model.parameters() if weight.requires_grad]

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
        for ours, plain in zip(lever.trained(), baseline.trained(), strict=True):
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


def predicted_peak(name: str) -> int:
    """Bytes."""
    fields, memory = LEVERS[name]
    shape = config(name)
    settings = {
        "args": {"per_device_train_batch_size": ROWS, **fields},
        "seq_len": LENGTH,
        "hardware": "auto" if torch.cuda.is_available() else "cpu",
        "peft_config": lora(name),
        "attn_implementation": shape._attn_implementation,
        "memory_args": MemoryArguments(**memory),
    }
    if quantization := quantization_of(name):
        settings |= {"dtype": "float32", "quantization_config": quantization}
    if memory.get("weight_streaming") and not torch.cuda.is_available():  # an estimate for a CPU does not stream
        job = dataclasses.replace(describe(shape, **settings).at_depth(shape.num_hidden_layers), discrete_memory=True)
        return max(peak.total for peak in run_trace(job).peaks.values())
    return estimate(shape, **settings).peak_allocated_bytes


def again(row: dict) -> dict:
    """What is predicted now; where streamed weights are, without the lanes of main(), as many bytes."""
    return {"predicted_bytes": predicted_peak(row["lever"])}


def row_of(name: str) -> dict:
    plain = next((f"baseline, {job}" for job in JOBS if name.endswith(job)), "baseline")
    peak, baseline_peak = peak_of(name), peak_of(plain)
    predicted = predicted_peak(name)
    baseline, lever = Stepper(plain), Stepper(name)
    row = {
        "lever": name,
        "peak_bytes": peak,
        "saved_bytes": baseline_peak - peak,
        "predicted_bytes": predicted,
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
    if not name.endswith(JOBS) and name != EAGER and not name.startswith(ANOTHER_FUNCTION):
        row["held_out_loss_ratio"] = round(held_out_loss(name) / held_out_loss("baseline"), 5)
    return row


def main(chosen: list[str]) -> None:
    """All levers, or those that are named, whose rows then take the place of older ones."""
    if not torch.cuda.is_available():
        weight_streaming.make_lanes = lambda _: HostLanes()
    found = [row_of(name) for name in track(chosen or LEVERS, description="levers")]
    for row in found:
        print(json.dumps(row))
    if chosen:
        older = json.loads((RESULTS / "levers.json").read_text())
        measured = {"date": older["date"], "device": older["hardware"]["device"]}
        rows = {row["lever"]: row for row in (*({**measured, **row} for row in older["rows"]), *found)}
        found = [rows[name] for name in LEVERS if name in rows]
    record("levers", found)


if __name__ == "__main__":
    main(sys.argv[1:])
