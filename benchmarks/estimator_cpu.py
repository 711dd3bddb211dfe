"""The estimator against the truth on the CPU: python benchmarks/estimator_cpu.py

Truth is the real Trainer, trained for two optimizer steps on real tensors; its peak is the sum of the allocator's
events as the profiler recorded them. Every row has another family, length, vocabulary or setting. Beside each
prediction stands what accelerate's estimate-memory and DeepSpeed's formula say. Several processes: engines.py.
"""

import tempfile
import time
import tomllib
from pathlib import Path
from unittest import mock

from jobs import four_bits, loaded_bytes, lora, same_rows, trained_peak, with_checkpointing
from record import record
from rich.progress import track

JOBS = tomllib.loads((Path(__file__).parent / "data" / "estimator_cpu.toml").read_text())
LENGTHS = (64, 256, 512, 1024)
VOCABULARIES = (1000, 4000, 16000, 64000)
ROWS_PER_FAMILY = 6


def jobs():
    """Every family with six of the settings, lengths and vocabularies in turn."""
    names = list(JOBS["settings"])
    for number, family in enumerate(JOBS["families"]):
        for turn in range(ROWS_PER_FAMILY):
            index = number * ROWS_PER_FAMILY + turn
            yield family, names[index % len(names)], LENGTHS[index % 4], VOCABULARIES[(index // 4 + number) % 4]


def config_of(family: str, vocabulary: int, layers: int):
    from transformers import AutoConfig

    depth = "n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"
    return AutoConfig.for_model(family, vocab_size=vocabulary, **{depth: layers}, **JOBS["families"][family])


def packed_rows():
    import torch
    from transformers import AutoModelForCausalLM

    from hf_memopt.levers.adapters import add_adapters

    for number, (setting, job) in enumerate(JOBS["quantized"].items()):
        family, vocabulary = ("llama", "qwen2", "mistral")[number % 3], VOCABULARIES[number % 3]
        config, fields, packing, length = packed_job(family, vocabulary, job)
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=packing)
        # Loading is left out: on a CPU the checkpoint, mapped into memory, would be the peak of so small a model.
        measured = loaded_bytes(model)
        adapted, rows = (lambda model=model: add_adapters(model, lora())), same_rows(length, 16)
        measured += trained_peak(adapted, fields, rows, eval_dataset=rows[:8])
        yield row_of(
            family, setting, length, vocabulary, config, predicted(family, setting, length, vocabulary), measured
        )


def packed_job(family: str, vocabulary: int, job: dict) -> tuple:
    """Configuration, TrainingArguments fields, quantization and tokens of a job whose weights are packed."""
    fields = {"per_device_train_batch_size": 2, "bf16": True, **with_checkpointing(job["fields"])}
    return config_of(family, vocabulary, 8), fields, four_bits(job["double"]), job["tokens"]


def plain_job(family: str, setting: str, vocabulary: int) -> tuple:
    """Configuration, TrainingArguments fields, adapters, dtype and attention of any other job."""
    job = JOBS["settings"][setting]
    fields = {"per_device_train_batch_size": 2, **with_checkpointing(job.get("fields", {}))}
    adapter = lora(**job["lora"]) if "lora" in job else None
    config = config_of(family, vocabulary, job["layers"])
    return config, fields, adapter, job.get("dtype", "float32"), job.get("attention")


def predicted(family: str, setting: str, length: int, vocabulary: int):
    """The estimate of a row's job."""
    from hf_memopt.estimator import estimate

    if setting in JOBS["quantized"]:
        config, fields, packing, length = packed_job(family, vocabulary, JOBS["quantized"][setting])
        return estimate(config, fields, length, "cpu", lora(), "bfloat16", quantization_config=packing)
    config, fields, *more = plain_job(family, setting, vocabulary)
    return estimate(config, fields, length, "cpu", *more)


def again(row: dict) -> dict:
    """What is predicted now."""
    found = predicted(row["family"], row["setting"], row["seq_len"], row["vocab_size"])
    return {"predicted_bytes": found.peak_allocated_bytes, "phase": found.phase}


def row_of(family, setting, length, vocabulary, config, found, measured) -> dict:
    """One row: predicted, measured, and what the two best-known formulas say of the model."""
    import torch
    from accelerate.commands.estimate import estimate_training_usage
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = sum(weight.numel() for weight in model.parameters())
    widest = max(sum(weight.numel() for weight in part.parameters(recurse=False)) for part in model.modules())
    accelerate = max(estimate_training_usage(weights * 4, "float32").values())
    offloading = {"cpu_offload": False, "cpu_offload_params": False, "zero_init": True}
    _, deepspeed, _ = estimate_zero3_model_states_mem_needs(weights, widest, 1, 1, **offloading)
    return {
        "family": family,
        "setting": setting,
        "seq_len": length,
        "vocab_size": vocabulary,
        "layers": config.num_hidden_layers,
        "predicted_bytes": found.peak_allocated_bytes,
        "measured_bytes": measured,
        "error": round(found.peak_allocated_bytes / measured - 1, 6),
        "phase": found.phase,
        "accelerate_error": round(accelerate / measured - 1, 4),
        "deepspeed_error": round(deepspeed / measured - 1, 4),
    }


def truth(config, fields, length, dtype, adapter, attention) -> int:
    """Bytes: the allocator's peak over model, two steps and all between."""
    import torch
    from transformers import AutoModelForCausalLM

    from hf_memopt.levers.adapters import add_adapters

    def make_model():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
        return add_adapters(model, adapter) if adapter else model

    # As in a process of its own: bitsandbytes keeps what a Trainer asks of a weight, by its place, for the next one.
    with mock.patch("bitsandbytes.optim.GlobalOptimManager._instance", None):
        return trained_peak(make_model, fields, same_rows(length), eval_dataset=same_rows(length, 8))


def main() -> None:
    rows = []
    for family, setting, length, vocabulary in track(list(jobs()), description="jobs"):
        start = time.perf_counter()
        found = predicted(family, setting, length, vocabulary)
        seconds = time.perf_counter() - start
        config, fields, adapter, dtype, attention = plain_job(family, setting, vocabulary)
        measured = truth(config, fields, length, dtype, adapter, attention)
        row = row_of(family, setting, length, vocabulary, config, found, measured)
        rows.append({**row, "estimating_s": round(seconds, 2)})
    rows += packed_rows()
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:12]:
        print(f"{row['error']:+9.3%}  {row['family']:>12}  {row['setting']}, {row['seq_len']} × {row['vocab_size']}")
    record("estimator_cpu", rows)


if __name__ == "__main__":
    main()
