"""Part 1: allocated, reserved and the driver's bytes of real training beside the prediction."""

import dataclasses

from benchmarks.gpu.case import Case
from hf_memopt.contrib.calibration.training import Setting, train

BF16 = {"bf16": True}
CHECKPOINTED = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
OFFLOADED = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
}
BOTH = {**BF16, **CHECKPOINTED}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2}
LARGE, MEDIUM = "llama-3.1-8b", "qwen3-1.7b"
LORA = {"method": "lora", "dtype": "bfloat16"}
# Most valuable first: what people do most, then one setting for every kind, then the rest.
SETTINGS = {
    "LoRA 8B, checkpointed": Setting("LoRA", LARGE, BOTH, **LORA, micro=1, length=4096),
    "full 0.5B": Setting("full", fields=BF16),
    "QLoRA 8B, checkpointed": Setting("QLoRA", LARGE, BOTH, method="qlora", dtype="bfloat16", micro=1, length=2048),
    "full 1.7B, checkpointed": Setting("full", MEDIUM, BOTH, micro=4, length=2048),
    "full 0.5B, fp32": Setting("precision", fields={}),
    "full 0.5B, fp16": Setting("precision", fields={"fp16": True}),
    "full 0.5B, pure bf16": Setting("precision", fields=BF16, dtype="bfloat16"),
    "eager": Setting("attention", fields=BF16, attention="eager"),
    "flash_attention_2": Setting("attention", fields=BF16, attention="flash_attention_2"),
    "padded": Setting("padding", fields=BF16, padded=True, micro=4),
    "8-bit AdamW": Setting("optimizer", MEDIUM, {**BOTH, "optim": "adamw_8bit"}),
    "paged 8-bit AdamW": Setting("optimizer", MEDIUM, {**BOTH, "optim": "paged_adamw_8bit"}),
    "paged AdamW": Setting("optimizer", fields={**BF16, "optim": "paged_adamw_32bit"}),
    "Adafactor": Setting("optimizer", fields={**BF16, "optim": "adafactor"}),
    "SGD": Setting("optimizer", fields={**BF16, "optim": "sgd"}),
    "AdamW over a loop": Setting("optimizer", fields={**BF16, "optim": "adamw_torch"}),
    "8-bit Lion": Setting("optimizer", fields={**BF16, "optim": "lion_8bit"}),
    "accumulation 4": Setting("accumulation", fields={**BF16, "gradient_accumulation_steps": 4}),
    "evaluated": Setting("evaluation", fields={**BOTH, **EVALUATED}),
    "offloaded checkpoints": Setting("checkpointing", MEDIUM, {**BF16, **OFFLOADED}, **LORA, length=4096),
    "checkpoint_ratio=0.5": Setting("checkpointing", MEDIUM, BF16, {"checkpoint_ratio": 0.5}, length=2048),
    "checkpoint_keeps=attention": Setting("checkpointing", MEDIUM, BF16, {"checkpoint_keeps": "attention"}),
    "checkpoint_keeps=matmuls": Setting("checkpointing", MEDIUM, BF16, {"checkpoint_keeps": "matmuls"}),
    "loss_chunk_size": Setting("lever", fields=BOTH, memory={"loss_chunk_size": 1024}, micro=8),
    "activation_compression": Setting("lever", fields=BF16, memory={"activation_compression": "int8"}),
    "activation_offload": Setting("lever", fields=BF16, memory={"activation_offload": True}),
    "MemoryTrainer alone": Setting("lever", fields={**BF16, "gradient_accumulation_steps": 2}, memory={}),
    "adam_mini": Setting("lever", fields=BOTH, memory={"adam_mini": True}),
    "optimizer_cpu_offload": Setting("lever", fields=BOTH, memory={"optimizer_cpu_offload": True}),
    "optimizer_in_backward": Setting(
        "lever", fields={**BOTH, "max_grad_norm": 0.0}, memory={"optimizer_in_backward": True}
    ),
    "sliding_window": Setting("lever", fields=BF16, memory={"sliding_window": 256}, length=2048),
    "sparse_block_size": Setting("lever", fields=BF16, memory={"sparse_block_size": 128}, length=4096),
    "logits_to_keep": Setting("lever", fields=BF16, memory={"logits_to_keep": True}),
    "MoE": Setting("MoE", "qwen3-30b-a3b", BOTH, dtype="bfloat16", micro=1, sizes={"num_hidden_layers": 4}),
    "MoE, LoRA": Setting("MoE", "qwen3-30b-a3b", BOTH, **LORA, micro=1, sizes={"num_hidden_layers": 8}),
    "Gemma": Setting("full", "gemma-3-1b", BOTH, micro=2),
    "GPT-2": Setting("full", "gpt2-large", BF16),
    "full 4B": Setting("full", "qwen3-4b", BOTH, micro=1, length=4096),
    **{
        f"adapter {method}": Setting("adapter", fields=BF16, method=method, dtype="bfloat16")
        for method in ("dora", "rslora", "loha", "ia3", "vera", "prompt")
    },
    "segments instead of expandable": Setting("allocator", MEDIUM, BOTH, length=2048),
}


def cases(rehearse: bool) -> list[Case]:
    """Every setting, alternating with other parts from the tenth on."""
    found = []
    for number, (name, setting) in enumerate(SETTINGS.items()):
        setting = setting.rehearsed() if rehearse else setting
        # Anything but expandable_segments keeps configure_allocator() from switching it on.
        env = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"} if setting.kind == "allocator" else {}
        worth = number if number < 10 else 10 * number - 80
        found.append(Case("estimator", name, worth, dataclasses.asdict(setting), env, rehearse=rehearse))
    return found


def measure(case: Case) -> dict:
    """Train it."""
    return train(Setting(**case.settings))
