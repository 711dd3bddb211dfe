"""Memory features that are incompatible with other settings; the trainer and the estimator both ask here."""

from collections.abc import Iterator
from typing import Any

from hf_memopt.compatibility.rules import CUDA_GRAPHS
from hf_memopt.compatibility.setup import compile_mode
from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import MemoryArguments

_SHARDING = ("fsdp1", "fsdp2", "mesh", "deepspeed")


def check_levers(
    memory_args: MemoryArguments, fields: dict[str, Any], engine: str, zero_stage: int = 0, device: str = "cuda"
) -> None:
    """Raise for the first incompatible pair of settings.

    Args:
        fields: TrainingArguments fields that differ from their defaults.
        engine: none, ddp, fsdp1, fsdp2, mesh or deepspeed.
        zero_stage: DeepSpeed's.
        device: cuda, rocm, mps, xpu or cpu.

    Raises:
        InputError: the reason, and which setting to leave out.
    """
    for reason in refusals(memory_args, fields, engine, zero_stage, device):
        raise InputError(reason)


def refusals(
    memory_args: MemoryArguments, fields: dict[str, Any], engine: str, zero_stage: int = 0, device: str = "cuda"
) -> Iterator[str]:
    """One sentence for each incompatibility of a job's settings."""
    if memory_args.loss_chunk_size is not None and fields.get("use_liger_kernel"):
        yield "use_liger_kernel and loss_chunk_size both replace the loss: use one of them"
    if memory_args.mlp_tile_size is not None and fields.get("use_liger_kernel"):
        yield "use_liger_kernel and mlp_tile_size both replace the MLP: use one of them"
    if memory_args.loss_chunk_size is not None and engine == "mesh":
        yield (
            "loss_chunk_size calls the head a second time, which crashes when transformers shards the model: leave it "
            "out, or use fsdp2 or zero3"
        )
    if memory_args.quantized_experts:
        if fields.get("torch_compile"):
            yield "quantized_experts chooses which tensors to save, as torch_compile does: use one of them"
        if engine in ("fsdp1", "fsdp2", "mesh") or zero_stage == 3:
            name = "ZeRO-3" if zero_stage == 3 else engine
            yield f"quantized_experts needs whole weights, and {name} shards them: leave it out"
    if memory_args.logits_to_keep:
        if memory_args.loss_chunk_size is not None:
            yield "loss_chunk_size already skips tokens without labels: leave logits_to_keep out"
        if fields.get("label_smoothing_factor"):
            yield (
                "label_smoothing_factor needs all logits: leave logits_to_keep out and use loss_chunk_size, which "
                "supports it"
            )
    kept_elsewhere = [name for name in ("activation_compression", "activation_offload") if getattr(memory_args, name)]
    for name in kept_elsewhere:
        if fields.get("torch_compile"):
            yield f"torch_compile decides which activations to save: leave {name} out"
        if zero_stage == 3:
            # Saved weights are recognized by their storage, and ZeRO-3 allocates another one at every gather.
            yield f"{name} would store the weights that ZeRO-3 gathers: leave it out, or use fsdp2 or zero2"
    if memory_args.compile_memory_budget is not None and not fields.get("torch_compile"):
        yield "compile_memory_budget applies to compiled models only: set torch_compile=True, or use checkpoint_ratio"
    mode = compile_mode(fields.get)
    if memory_args.oom_recovery and mode in CUDA_GRAPHS and device in ("cuda", "rocm"):
        # torch._inductor.cudagraph_trees (2.13): can_start_new_generation() is False as long as a forward waits for
        # its backward, which after running out of memory never comes.
        yield (
            f"torch_compile_mode={mode} records CUDA graphs, which do not free the memory of a step that failed: use "
            "max-autotune-no-cudagraphs, or set oom_recovery=False"
        )
    if memory_args.max_tokens_per_batch is not None:
        if memory_args.max_batch_size is not None:
            yield "max_batch_size and max_tokens_per_batch both limit the micro-batch: use one of them"
        if str(fields.get("train_sampling_strategy", "random")) in ("group_by_length", "batch_rebalance"):
            yield "max_tokens_per_batch already groups samples by length: leave train_sampling_strategy out"
    yield from _refuse_streaming(memory_args, fields, engine)
    yield from _refuse_attention(memory_args)
    yield from _refuse_checkpointing(memory_args, fields)
    yield from _refuse_optimizers(memory_args, fields, engine)


def _refuse_streaming(memory_args: MemoryArguments, fields: dict[str, Any], engine: str) -> Iterator[str]:
    if not memory_args.weight_streaming:
        if (ratio := memory_args.weight_streaming_ratio) != MemoryArguments.weight_streaming_ratio:
            yield f"weight_streaming_ratio={ratio} has no effect without weight_streaming: set it too, or leave it out"
        return
    if engine not in ("none", "ddp"):
        yield (
            f"weight_streaming needs whole weights on every process: leave it out under {engine}, or use ddp, or "
            "strategy zero3_offload_cpu without it"
        )
    if fields.get("torch_compile"):
        yield "torch_compile would compile weights that are not on the device: leave weight_streaming out"


def _refuse_attention(memory_args: MemoryArguments) -> Iterator[str]:
    if memory_args.sparse_block_size is None:
        for name in ("num_local_blocks", "num_global_blocks"):
            if (value := getattr(memory_args, name)) != getattr(MemoryArguments, name):
                yield f"{name}={value} has no effect without sparse_block_size: set it too, or leave {name} out"
    elif memory_args.sliding_window is not None:
        yield "sparse_block_size and sliding_window both restrict attention: use one of them"


def _refuse_checkpointing(memory_args: MemoryArguments, fields: dict[str, Any]) -> Iterator[str]:
    kwargs = fields.get("activation_checkpointing_kwargs") or {}
    if memory_args.checkpoint_ratio is None and memory_args.checkpoint_keeps is None:
        return
    name = "checkpoint_ratio" if memory_args.checkpoint_ratio is not None else "checkpoint_keeps"
    if kwargs.get("every_n_layers", 1) != 1:
        yield f"every_n_layers={kwargs['every_n_layers']} and {name} both choose what is checkpointed: use one of them"
    if kwargs.get("use_reentrant"):
        yield f"{name} needs activation_checkpointing_kwargs.use_reentrant=False"
    config = fields.get("fsdp_config") or {}
    if isinstance(config, dict) and config.get("activation_checkpointing"):
        yield f"fsdp_config.activation_checkpointing checkpoints every layer: set it to false to use {name}"


def _refuse_optimizers(memory_args: MemoryArguments, fields: dict[str, Any], engine: str) -> Iterator[str]:
    if memory_args.optimizer_cpu_offload:
        if engine != "none":
            yield (
                f"optimizer_cpu_offload supports a single device: leave it out under {engine}, "
                "and use strategy zero2_offload_cpu"
            )
        if memory_args.optimizer_in_backward:
            yield "optimizer_in_backward and optimizer_cpu_offload both replace the optimizer step: use one of them"
        if fields.get("fp16"):
            yield "optimizer_cpu_offload does not support the gradient scaler of fp16: use bf16=True"
        optim = getattr(fields.get("optim"), "value", fields.get("optim")) or ""
        if any(part in optim for part in ("bit", "bnb", "lomo", "layerwise")):
            yield f"optim={optim} has no fast CPU step for optimizer_cpu_offload: use adamw_torch_fused"
    if memory_args.adam_mini and engine in _SHARDING:
        yield f"adam_mini needs unsharded weights, and {engine} shards them: leave it out"
    if not memory_args.optimizer_in_backward:
        return
    if engine != "none":
        yield f"optimizer_in_backward would use gradients before {engine} has reduced them: leave it out"
    if fields.get("gradient_accumulation_steps", 1) > 1:
        yield (
            "optimizer_in_backward updates weights in every backward pass: set gradient_accumulation_steps=1, "
            "with a larger per_device_train_batch_size"
        )
    if fields.get("max_grad_norm", 1.0):
        yield (
            "optimizer_in_backward never holds all gradients at once and cannot clip their norm: set max_grad_norm=0"
        )
    if fields.get("fp16"):
        yield "optimizer_in_backward cannot unscale fp16's gradients: use bf16=True"


def check_with_trl(memory_args: MemoryArguments, what: str) -> None:
    """Refuse what works on logits: TRL's own head (trl 1.16, add_fused_lm_head) takes the model's forward.

    Args:
        what: the trainer or task.

    Raises:
        InputError: a memory feature of the loss is on.
    """
    for name in ("loss_chunk_size", "logits_to_keep"):
        if getattr(memory_args, name):
            raise InputError(f"{name} goes without {what}: TRL's trainers compute their loss in tiles themselves")
    if memory_args.weight_streaming:
        raise InputError(f"weight_streaming goes without {what}: TRL's trainers read the head outside of the model")
