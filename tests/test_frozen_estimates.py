"""Whole estimates of models of a few layers, frozen: every byte by kind and phase, every note, the speed."""

import frozen
import pytest
from transformers import AutoConfig

from hf_memopt import MemoryArguments, estimate

SMALL = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "vocab_size": 300}
LLAMA = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128, "num_hidden_layers": 6}
MODELS = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "tie_word_embeddings": True},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bert": {**SMALL, "num_hidden_layers": 5, "max_position_embeddings": 128},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 80, "num_heads": 4, "num_layers": 5, "vocab_size": 300},
    "gpt2": {"n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 128, "vocab_size": 300},
}
BATCH = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}


def check(name: str, model: str, hardware: str, fields: dict, length: int = 48, **more) -> None:
    """Compare a job's whole estimate with the frozen one."""
    config = AutoConfig.for_model(model, **MODELS[model])
    found = estimate(config, {**BATCH, **fields}, length, hardware, **more)
    values = found.to_dict() | {"text": str(found).splitlines()}
    values |= {key: frozen.figures(values[key]) for key in ("step_seconds", "tokens_per_second", "mfu")}
    del values["training_arguments"]
    values["notes"] = [note for note in values["notes"] if "benchmarks/" not in note]  # figures that are measured anew
    assert max(height for _, height in found.timeline) <= found.peak_allocated_bytes
    frozen.check(f"estimate_{name}", values)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("hardware", ["cpu", "rtx_4090", "t4", "apple_m2_16gb", "mi300x"])
def test_on_a_device(hardware):
    precision = {"cpu": {}, "t4": {"fp16": True}}.get(hardware, {"bf16": True})
    check(f"on_{hardware}", "llama", hardware, precision)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("model", ["qwen2", "mixtral", "bert", "t5", "gpt2"])
def test_of_a_model(model):
    check(f"of_{model}", model, "rtx_3060", {"bf16": True})


@pytest.mark.drawn(1)
@pytest.mark.parametrize("model", ["llama", "t5"])
def test_with_checkpointing(model):
    check(f"checkpointed_{model}", model, "rtx_3060", {"bf16": True, "activation_checkpointing": True})


def test_with_some_layers_checkpointed():
    check("some_checkpointed", "llama", "rtx_3060", {"bf16": True}, memory_args=MemoryArguments(checkpoint_ratio=0.5))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("optim", ["sgd", "adafactor", "adamw_8bit", "paged_adamw_8bit", "lion_8bit"])
def test_with_an_optimizer(optim):
    check(f"with_{optim}", "llama", "rtx_3060", {"bf16": True, "optim": optim})


def test_with_evaluation():
    fields = {"bf16": True, "eval_strategy": "steps", "eval_accumulation_steps": 3, "per_device_eval_batch_size": 4}
    check("with_evaluation", "llama", "rtx_3060", fields)


def test_with_adapters():
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    check("with_adapters", "llama", "rtx_3060", {"bf16": True}, peft_config=lora, dtype="bfloat16")


def test_without_gradients_kept():
    fields = {"bf16": True, "gradient_accumulation_steps": 1, "max_grad_norm": 0}
    check("in_backward", "llama", "rtx_3060", fields, memory_args=MemoryArguments(optimizer_in_backward=True))


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    "asked",
    [
        {"activation_offload": True},
        {"activation_compression": "int8"},
        {"loss_chunk_size": 16},
        {"mlp_tile_size": 16},
        {"adam_mini": True},
        {"optimizer_cpu_offload": True},
        {"sliding_window": 16},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_with_a_memory_feature(asked):
    check(f"with_{next(iter(asked))}", "llama", "rtx_3060", {"bf16": True}, memory_args=MemoryArguments(**asked))


@pytest.mark.drawn(2)
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp2"])
def test_under_an_engine(strategy):
    check(f"under_{strategy}", "llama", "a100_80gb", {"bf16": True}, world_size=4, strategy=strategy)
