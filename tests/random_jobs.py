"""Random jobs as a command line asks about them: models × methods × engines × optimizers × settings."""

import random

# What models have in common: tiny, and with more layers than are traced.
_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
# Model type -> fields of its configuration: dense, with a pattern of layers, with experts, an encoder.
_MODELS = {
    "llama": {},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "gemma3_text": {"head_dim": 16, "sliding_window": 32, "query_pre_attn_scalar": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 64, "n_head": 4, "n_positions": 4096},
    "bert": {},
}
_OPTIMIZERS = (
    *("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"),
    *("lion_8bit", "adagrad", "galore_adamw", "rmsprop"),
)
_STRATEGIES = ("ddp", "fsdp2", "zero1", "zero2", "zero3", "zero2_offload_cpu", "hsdp2", "tp2")
# Setting -> values of which one is drawn.
_SETTINGS = {
    "activation_checkpointing": ("true", "false"),
    "bf16": ("true",),
    "dtype": ("float32", "bfloat16"),
    "attn_implementation": ("eager", "sdpa"),
    "label_smoothing_factor": ("0.1",),
    "neftune_noise_alpha": ("5",),
    "max_grad_norm": ("0", "1.0"),
    "eval_strategy": ("epoch",),
    "padded": ("true",),
    "loss_chunk_size": ("64", "1024"),
    "mlp_tile_size": ("64",),
    "activation_compression": ("int8",),
    "activation_offload": ("true",),
    "checkpoint_ratio": ("0.5",),
    "checkpoint_keeps": ("attention", "matmuls"),
    "optimizer_in_backward": ("true",),
    "optimizer_cpu_offload": ("true",),
    "adam_mini": ("true",),
    "weight_streaming": ("true",),
    "sliding_window": ("64",),
    "lora.r": ("4", "32"),
    "torch_empty_cache_steps": ("1",),
    "batch_eval_metrics": ("true",),
    "optim_target_modules": ("all-linear",),
}
# What goes with one process alone, and not with mixtures of sharding.
_ALONE = ("optimizer_in_backward", "optimizer_cpu_offload", "adam_mini", "weight_streaming", "checkpoint_ratio")


def random_job(number: int, depths: tuple[int, ...] = (2, 3, 4, 9, 24)) -> dict:
    """The job of a number, the same on every machine: arguments of command_spec(), `config` in place of the model.

    Args:
        depths: numbers of layers to choose from; up to six are traced whole, in a part of the time.
    """
    draw = random.Random(number)
    family = draw.choice(list(_MODELS))
    layers = draw.choice(depths)
    config = {
        **_SIZES,
        **_MODELS[family],
        "model_type": family,
        "num_hidden_layers": layers,
        "vocab_size": draw.choice((512, 8192, 50_000)),
    }
    if family == "gpt2":
        config["n_layer"] = config.pop("num_hidden_layers")
    world_size = draw.choice((1, 1, 2, 4))
    settings = {
        "per_device_train_batch_size": draw.choice((1, 2, 4)),
        "gradient_accumulation_steps": draw.choice((1, 1, 2, 4)),
        "optim": draw.choice(_OPTIMIZERS),
    }
    method = draw.choice(("full", "full", "lora", "qlora")) if family != "bert" else "full"
    strategy = draw.choice(_STRATEGIES) if world_size > 1 else None
    sensible = draw.random() < 0.8  # others are refused more often than not
    for name in draw.sample(list(_SETTINGS), draw.randint(0, 5)):
        fits = (world_size == 1 or name not in _ALONE) and (method != "full" or name != "lora.r")
        if fits or not sensible:
            settings[name] = draw.choice(_SETTINGS[name])
    if sensible and "optimizer_in_backward" in settings:
        settings |= {"gradient_accumulation_steps": 1, "max_grad_norm": "0"}
    if sensible and ("optimizer_cpu_offload" in settings or "offload" in (strategy or "") or "adam_mini" in settings):
        settings["optim"] = "adamw_torch"
    if sensible and "adam_mini" in settings:
        settings.pop("optim")
    if sensible and "galore" in settings.get("optim", ""):
        settings["optim_target_modules"] = "all-linear"
    return {
        "config": config,
        "method": method,
        "hardware": draw.choice(("rtx4090", "a100_80gb", "t4", "cpu")),
        "seq_len": draw.choice((16, 128, 512)),
        "world_size": world_size,
        "strategy": strategy,
        "settings": [f"{name}={value}" for name, value in settings.items()],
    }
