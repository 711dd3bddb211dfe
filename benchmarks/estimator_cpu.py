"""The estimator against the truth on the CPU: python benchmarks/estimator_cpu.py

Truth is the real Trainer, trained for two optimizer steps on real tensors; its peak is the sum of the allocator's
events as the profiler recorded them. Every row has another family, length, vocabulary or setting.
"""

import statistics
import tempfile
import time

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
    "opt": {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 352, "num_attention_heads": 4,
            "max_position_embeddings": 2048},
    "bloom": {"hidden_size": 128, "n_head": 4},
    "stablelm": GROUPED,
    "mixtral": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
EVERY_SECOND = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2},
}
# name -> (TrainingArguments fields, dtype, LoRA rank or 0, attention, layers)
SETTINGS = {
    "full fp32": ({}, "float32", 0, None, 4),
    "full bf16 over fp32": ({"bf16": True}, "float32", 0, None, 9),
    "full, checkpointed": (CHECKPOINTED, "float32", 0, None, 10),
    "pure bf16, checkpointed": ({**CHECKPOINTED, "bf16": True}, "bfloat16", 0, None, 12),
    "every second layer": ({**EVERY_SECOND, "bf16": True}, "float32", 0, None, 6),
    "LoRA bf16": ({"bf16": True}, "bfloat16", 8, None, 9),
    "LoRA, checkpointed": ({**CHECKPOINTED, "bf16": True}, "bfloat16", 8, None, 10),
    "adafactor": ({"optim": "adafactor"}, "float32", 0, None, 8),
    "8-bit AdamW": ({"optim": "adamw_8bit"}, "float32", 0, None, 8),
    "AdamW over a loop": ({"optim": "adamw_torch"}, "float32", 0, None, 5),
    "accumulation 4": ({"gradient_accumulation_steps": 4}, "float32", 0, None, 7),
    "eager attention": ({}, "float32", 0, "eager", 7),
    "no clipping": ({"max_grad_norm": 0.0}, "float32", 0, None, 8),
    "SGD": ({"optim": "sgd"}, "float32", 0, None, 8),
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


def peft_config(rank: int):
    from peft import LoraConfig

    return LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM") if rank else None


def truth(config, fields, length, dtype, rank, attention) -> int:
    """Bytes: the allocator's peak over model, two steps and all between."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hf_memopt.estimator.truth import allocator_peak
    from hf_memopt.levers.adapters import add_adapters

    rows = [{"input_ids": [7] * length, "labels": [7] * length}] * 32
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "logging_strategy": "no"}

    def train():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
        model = add_adapters(model, peft_config(rank)) if rank else model
        args = TrainingArguments(output_dir=folder, use_cpu=True, max_steps=2, **quiet, **fields)
        Trainer(model=model, args=args, train_dataset=rows, data_collator=default_data_collator).train()

    with tempfile.TemporaryDirectory() as folder:
        return allocator_peak(train)


def main() -> None:
    from hf_memopt.estimator import estimate

    rows = []
    for family, setting, length, vocabulary in track(list(jobs()), description="jobs"):
        fields, dtype, rank, attention, layers = SETTINGS[setting]
        fields = {"per_device_train_batch_size": 2, **fields}
        config = config_of(family, vocabulary, layers)
        start = time.perf_counter()
        try:
            found = estimate(config, fields, length, "cpu", peft_config(rank), dtype, attention)
        except Exception as failure:
            print(f"not traced: {family}, {setting}: {str(failure)[:150]}")
            continue
        seconds = time.perf_counter() - start
        measured = truth(config, fields, length, dtype, rank, attention)
        rows.append({
            "family": family, "setting": setting, "seq_len": length, "vocab_size": vocabulary, "layers": layers,
            "predicted_bytes": found.peak_allocated_bytes, "measured_bytes": measured,
            "error": round(found.peak_allocated_bytes / measured - 1, 6), "phase": found.phase,
            "estimating_s": round(seconds, 2),
        })  # fmt: skip
    for row in sorted(rows, key=lambda row: -abs(row["error"]))[:12]:
        print(f"{row['error']:+9.3%}  {row['family']:>12}  {row['setting']}, {row['seq_len']} × {row['vocab_size']}")
    errors = [row["error"] for row in rows]
    print(f"{len(rows)} jobs: median |error| {statistics.median(map(abs, errors)):.4%}, "
          f"lowest {min(errors):+.3%}, highest {max(errors):+.3%}")  # fmt: skip
    record("estimator_cpu", "python benchmarks/estimator_cpu.py", rows)


if __name__ == "__main__":
    main()
