"""The estimator against a CUDA card: python benchmarks/estimator_cuda.py [GiB that the card plays]

Every row is the real Trainer on this card, in a process of its own, two steps on random weights and tokens; measured
are the allocator's peaks (allocated and reserved) and what the driver says the device has given away. With a number,
the card plays a smaller one (torch.cuda.set_per_process_memory_fraction), and rows that run out of memory stay in the
table: the prediction should have said so. Needs a GPU; where there is none it says so and ends with exit code 2.
"""

import json
import subprocess
import sys

from record import record
from rich.progress import track

CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
# name -> (TrainingArguments fields, method)
SETTINGS = {
    "full, bf16 AMP": ({"bf16": True}, "full"),
    "full, bf16 AMP, checkpointed": ({"bf16": True, **CHECKPOINTED}, "full"),
    "full, 8-bit AdamW": ({"bf16": True, "optim": "adamw_8bit", **CHECKPOINTED}, "full"),
    "LoRA": ({"bf16": True}, "lora"),
    "LoRA, checkpointed": ({"bf16": True, **CHECKPOINTED}, "lora"),
    "QLoRA, checkpointed": ({"bf16": True, **CHECKPOINTED}, "qlora"),
}
MODELS = ("smollm2-135m", "gpt2", "qwen3-0.6b", "smollm2-1.7b", "gemma-3-1b", "qwen3-4b", "llama-3.1-8b")
SHAPES = ((1, 512), (4, 1024), (2, 4096))


def parts(model: str, setting: str):
    import torch
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    fields, method = SETTINGS[setting]
    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM") if method != "full" else None
    packing = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    dtype = "float32" if method == "full" else "bfloat16"
    return fields, lora, packing if method == "qlora" else None, dtype


def measure(model: str, setting: str, micro: int, length: int, limit: float) -> None:
    """In a process of its own: train, and print what was measured as the last line."""
    import tempfile

    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from hf_memopt.estimator.architectures import load_config
    from hf_memopt.levers.adapters import add_adapters

    if limit:
        torch.cuda.set_per_process_memory_fraction(limit * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    fields, lora, packing, dtype = parts(model, setting)
    row = {"input_ids": [7] * length, "labels": [7] * length}
    with tempfile.TemporaryDirectory() as folder:
        built = AutoModelForCausalLM.from_config(load_config(model), dtype=getattr(torch, dtype))
        if packing is not None:
            built.save_pretrained(folder)
            built = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=packing)
        built = add_adapters(built, lora) if lora else built
        args = TrainingArguments(
            output_dir=f"{folder}/out",
            max_steps=2,
            per_device_train_batch_size=micro,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            **fields,
        )
        outcome = "trained"
        try:
            Trainer(built, args, train_dataset=[row] * 16, data_collator=default_data_collator).train()
        except torch.OutOfMemoryError:
            outcome = "out of memory"
    free, total = torch.cuda.mem_get_info()
    print(
        json.dumps(
            {
                "outcome": outcome,
                "allocated_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "device_bytes": total - free,
            }
        )
    )


def main(limit: float) -> None:
    import torch

    from hf_memopt.estimator import estimate
    from hf_memopt.hardware import detect

    if not torch.cuda.is_available():
        print("no CUDA device here: nothing to measure", file=sys.stderr)
        sys.exit(2)
    device, rows = detect(), []
    jobs = [(model, setting, *shape) for model in MODELS for setting in SETTINGS for shape in SHAPES]
    for model, setting, micro, length in track(jobs, description="jobs"):
        if model == "gpt2" and length > 1024:
            continue
        fields, lora, packing, dtype = parts(model, setting)
        found = estimate(
            model,
            {"per_device_train_batch_size": micro, **fields},
            length,
            device,
            lora,
            dtype,
            quantization_config=packing,
        )
        if found.peak_allocated_bytes > 1.5 * device.memory:
            continue
        words = [sys.executable, __file__, "--measure", model, setting, str(micro), str(length), str(limit)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            print(f"failed: {model}, {setting}: {done.stderr.strip().splitlines()[-1:]}")
            continue
        measured = json.loads(done.stdout.strip().splitlines()[-1])
        error = found.peak_allocated_bytes / measured["allocated_bytes"] - 1
        rows.append(
            {
                "model": model,
                "setting": setting,
                "micro_batch": micro,
                "seq_len": length,
                "limit_gib": limit,
                **measured,
                "predicted_allocated_bytes": found.peak_allocated_bytes,
                "predicted_reserved_bytes": found.reserved_bytes,
                "predicted_device_bytes": found.device_bytes,
                "error": round(error, 5) if measured["outcome"] == "trained" else None,
            }
        )
        print(f"{error:+8.2%}  {measured['outcome']}  {model}, {setting}, {micro} × {length}")
    record("estimator_cuda", "python benchmarks/estimator_cuda.py", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), float(sys.argv[6]))
    else:
        main(float(sys.argv[1]) if sys.argv[1:] else 0.0)
