"""The estimator against the truth on the CPU: python benchmarks/estimator_cpu.py

Truth is the real Trainer, trained for two optimizer steps on real tensors; its peak is the sum of the allocator's
events as the profiler recorded them. Every row has another family, length, vocabulary or setting. Rows of two
processes are started by accelerate launch under DDP and DeepSpeed; there the truth is every live tensor of rank 0
(see sharded_truth.py). Beside each prediction stands what accelerate's estimate-memory and DeepSpeed's formula say.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

from jobs import CHECKPOINTED, four_bits, loaded_bytes, lora, same_rows, trained_peak
from record import record
from rich.progress import track

SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4, "max_position_embeddings": 2048}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
FAMILIES = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "gemma": {**GROUPED, "head_dim": 32},
    "gemma2": {**GROUPED, "head_dim": 32, "sliding_window": 128},
    "gemma3_text": {**GROUPED, "head_dim": 32, "sliding_window": 128},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "olmo2": GROUPED,
    "smollm3": {**GROUPED, "pad_token_id": 0},
    "gpt2": {"n_embd": 128, "n_head": 4, "n_positions": 2048},
    "gpt_neox": SHAPE,
    "opt": {
        **{"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 352},
        **{"num_attention_heads": 4, "max_position_embeddings": 2048},
    },
    "bloom": {"hidden_size": 128, "n_head": 4},
    "stablelm": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
EVERY_SECOND = {**CHECKPOINTED, "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
SAVED = {**EVALUATED, "save_strategy": "steps", "save_steps": 1}
# name -> (TrainingArguments fields, dtype, LoraConfig fields or None, attention, layers)
SETTINGS = {
    "full fp32": ({}, "float32", None, None, 4),
    "full bf16 over fp32": ({"bf16": True}, "float32", None, None, 9),
    "full, checkpointed": (CHECKPOINTED, "float32", None, None, 10),
    "pure bf16, checkpointed": ({**CHECKPOINTED, "bf16": True}, "bfloat16", None, None, 12),
    "every second layer": ({**EVERY_SECOND, "bf16": True}, "float32", None, None, 11),
    "LoRA bf16": ({"bf16": True}, "bfloat16", {}, None, 9),
    "LoRA, checkpointed": ({**CHECKPOINTED, "bf16": True}, "bfloat16", {}, None, 10),
    "adafactor": ({"optim": "adafactor"}, "float32", None, None, 8),
    "8-bit AdamW": ({"optim": "adamw_8bit"}, "float32", None, None, 8),
    "AdamW over a loop": ({"optim": "adamw_torch"}, "float32", None, None, 5),
    "accumulation 4": ({"gradient_accumulation_steps": 4}, "float32", None, None, 7),
    "eager attention": ({}, "float32", None, "eager", 7),
    "no clipping": ({"max_grad_norm": 0.0}, "float32", None, None, 8),
    "SGD": ({"optim": "sgd"}, "float32", None, None, 8),
    "evaluated": (EVALUATED, "float32", None, None, 7),
    "evaluated and saved": ({**SAVED, **CHECKPOINTED, "bf16": True}, "float32", None, None, 8),
    "DoRA": ({"bf16": True}, "bfloat16", {"use_dora": True}, None, 8),
    "8-bit Lion": ({"optim": "lion_8bit"}, "float32", None, None, 8),
}
LENGTHS = (64, 256, 512, 1024)
VOCABULARIES = (1000, 4000, 16000, 64000)
ROWS_PER_FAMILY = 6


def jobs():
    """Every family with six of the settings, lengths and vocabularies in turn."""
    names = list(SETTINGS)
    for number, family in enumerate(FAMILIES):
        for turn in range(ROWS_PER_FAMILY):
            index = number * ROWS_PER_FAMILY + turn
            yield family, names[index % len(names)], LENGTHS[index % 4], VOCABULARIES[(index // 4 + number) % 4]


def config_of(family: str, vocabulary: int, layers: int):
    from transformers import AutoConfig

    depth = "n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers"
    return AutoConfig.for_model(family, vocab_size=vocabulary, **{depth: layers}, **FAMILIES[family])


# What is trained with 4-bit weights: (TrainingArguments fields, double quantization, length)
PACKED = {
    "QLoRA": ({}, True, 64),
    "QLoRA, checkpointed": (CHECKPOINTED, True, 128),
    "QLoRA, single quantization": (CHECKPOINTED, False, 256),
    "QLoRA, 8-bit AdamW, evaluated": ({**CHECKPOINTED, **EVALUATED, "optim": "adamw_8bit"}, True, 256),
    "QLoRA, accumulation 4": ({**CHECKPOINTED, "gradient_accumulation_steps": 4}, True, 512),
    "QLoRA, saved": ({**CHECKPOINTED, **SAVED}, True, 512),
}
BF16 = {**CHECKPOINTED, "bf16": True}
# Two processes: name -> (accelerate YAML, strategy, fields)
SHARDED = {
    "DDP": ("cpu_x2", "ddp", {}),
    "DDP, checkpointed, bf16": ("cpu_x2", "ddp", {**CHECKPOINTED, "bf16": True}),
    "ZeRO-2": ("cpu_x2_zero2", "zero2", {}),
    "ZeRO-2, bf16": ("cpu_x2_zero2", "zero2", {"bf16": True}),
    "ZeRO-2, accumulation 4": ("cpu_x2_zero2", "zero2", {**BF16, "gradient_accumulation_steps": 4}),
    "ZeRO-3": ("cpu_x2_zero3", "zero3", {}),
    "ZeRO-3, bf16": ("cpu_x2_zero3", "zero3", {"bf16": True}),
    "ZeRO-3, checkpointed": ("cpu_x2_zero3", "zero3", {**CHECKPOINTED, "bf16": True}),
}


def packed_rows():
    import torch
    from transformers import AutoModelForCausalLM

    from hf_memopt.estimator import estimate
    from hf_memopt.levers.adapters import add_adapters

    for number, (setting, (fields, double, length)) in enumerate(PACKED.items()):
        family, vocabulary = ("llama", "qwen2", "mistral")[number % 3], VOCABULARIES[number % 3]
        config, packing = config_of(family, vocabulary, 8), four_bits(double)
        fields = {"per_device_train_batch_size": 2, "bf16": True, **fields}
        with tempfile.TemporaryDirectory() as folder:
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=packing)
        # Loading is left out: on a CPU the checkpoint, mapped into memory, would be the peak of so small a model.
        measured = loaded_bytes(model)
        adapted, rows = (lambda model=model: add_adapters(model, lora())), same_rows(length, 16)
        measured += trained_peak(adapted, fields, rows, eval_dataset=rows[:8])
        found = estimate(config, fields, length, "cpu", lora(), "bfloat16", quantization_config=packing)
        yield row_of(family, setting, length, vocabulary, config, found, measured, 1)


def sharded_rows():
    from transformers import AutoConfig

    from hf_memopt.estimator import estimate

    shape = {"model_type": "llama", "num_hidden_layers": 8, **GROUPED, "hidden_size": 256, "intermediate_size": 704}
    for number, (setting, (yaml, strategy, fields)) in enumerate(SHARDED.items()):
        length, vocabulary = (128, 256)[number % 2], (8000, 4000)[number % 2]
        config = {**shape, "vocab_size": vocabulary}
        fields = {"per_device_train_batch_size": 2, **fields}
        measured = sharded_truth(yaml, {"config": config, "fields": fields, "seq_len": length, "dtype": "float32"})
        config = AutoConfig.for_model(**config)
        found = estimate(config, fields, length, "cpu", world_size=2, strategy=strategy, rank=0)
        row = row_of("llama", setting, length, vocabulary, config, found, measured["tensors"], 2)
        yield {**row, "allocator_bytes": measured["allocator"]}


def sharded_truth(yaml: str, job: dict) -> dict[str, int]:
    """Bytes on rank 0 of two real processes."""
    root = Path(__file__).resolve().parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with tempfile.TemporaryDirectory() as folder:
        described, peak = Path(folder, "job.json"), Path(folder, "peak.json")
        described.write_text(json.dumps(job))
        launch = [Path(sys.executable).parent / "accelerate", "launch", "--config_file"]
        launch += [root / f"accelerate_configs/{yaml}.yaml", root / "benchmarks/sharded_truth.py", described, peak]
        subprocess.run(launch, check=True, cwd=root, env=environment, capture_output=True, timeout=600)
        return json.loads(peak.read_text())


def row_of(family, setting, length, vocabulary, config, found, measured, processes) -> dict:
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
    _, deepspeed, _ = estimate_zero3_model_states_mem_needs(weights, widest, processes, 1, **offloading)
    return {
        "family": family,
        "setting": setting,
        "seq_len": length,
        "vocab_size": vocabulary,
        "layers": config.num_hidden_layers,
        "processes": processes,
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
    from hf_memopt.estimator import estimate

    rows = []
    for family, setting, length, vocabulary in track(list(jobs()), description="jobs"):
        fields, dtype, adapter, attention, layers = SETTINGS[setting]
        fields, adapter = {"per_device_train_batch_size": 2, **fields}, None if adapter is None else lora(**adapter)
        config = config_of(family, vocabulary, layers)
        start = time.perf_counter()
        found = estimate(config, fields, length, "cpu", adapter, dtype, attention)
        seconds = time.perf_counter() - start
        measured = truth(config, fields, length, dtype, adapter, attention)
        row = row_of(family, setting, length, vocabulary, config, found, measured, 1)
        rows.append({**row, "estimating_s": round(seconds, 2)})
    for more in (packed_rows(), sharded_rows()):
        rows += list(more)
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:12]:
        print(f"{row['error']:+9.3%}  {row['family']:>12}  {row['setting']}, {row['seq_len']} × {row['vocab_size']}")
    record("estimator_cpu", rows)


if __name__ == "__main__":
    main()
