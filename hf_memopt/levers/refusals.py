"""What cannot work together, with the reason: asked by the trainer and by the estimator alike."""

from collections.abc import Iterator
from typing import Any

from hf_memopt.compatibility.rules import CUDA_GRAPHS
from hf_memopt.compatibility.setup import compile_mode
from hf_memopt.errors import InputError
from hf_memopt.levers.arguments import MemoryArguments

_SHARDING = ("fsdp2", "mesh", "deepspeed")


def check_levers(
    memory_args: MemoryArguments, fields: dict[str, Any], engine: str, zero_stage: int = 0, device: str = "cuda"
) -> None:
    """Refuse the first pair of settings that cannot work together.

    Args:
        fields: TrainingArguments fields that differ from their defaults.
        engine: none, ddp, fsdp2, mesh or deepspeed.
        zero_stage: DeepSpeed's.
        device: cuda, rocm, mps, xpu or cpu.

    Raises:
        InputError: with the reason and what to leave out.
    """
    for reason in refusals(memory_args, fields, engine, zero_stage, device):
        raise InputError(reason)


def refusals(
    memory_args: MemoryArguments, fields: dict[str, Any], engine: str, zero_stage: int = 0, device: str = "cuda"
) -> Iterator[str]:
    """Every reason why a job cannot have these settings."""
    if memory_args.loss_chunk_size is not None and fields.get("use_liger_kernel"):
        yield "use_liger_kernel and loss_chunk_size both replace the loss: keep one of them"
    if memory_args.loss_chunk_size is not None and engine == "mesh":
        yield (
            "loss_chunk_size calls the head once more, which with one that transformers cut up ends in a crash: "
            "leave it out, or use fsdp2 or zero3"
        )
    if memory_args.logits_to_keep:
        if memory_args.loss_chunk_size is not None:
            yield "loss_chunk_size leaves out what has no label already: leave logits_to_keep out"
        if fields.get("label_smoothing_factor"):
            yield (
                "label_smoothing_factor is applied to all logits: leave logits_to_keep out, loss_chunk_size knows both"
            )
    kept_elsewhere = [name for name in ("activation_compression", "activation_offload") if getattr(memory_args, name)]
    for name in kept_elsewhere:
        if fields.get("torch_compile"):
            yield f"torch_compile decides by itself what is saved: leave {name} out"
        if zero_stage == 3:
            # A saved weight is known as such by its storage, which ZeRO-3 changes whenever it gathers the weight.
            yield f"{name} would keep the weights that ZeRO-3 gathers: leave it out, or use fsdp2 or zero2"
    if memory_args.compile_memory_budget is not None and not fields.get("torch_compile"):
        yield "compile_memory_budget is the compiler's: set torch_compile=True, or use checkpoint_ratio"
    mode = compile_mode(fields.get)
    if memory_args.oom_recovery and mode in CUDA_GRAPHS and device in ("cuda", "rocm"):
        # torch._inductor.cudagraph_trees (2.13): can_start_new_generation() is False as long as a forward waits for
        # its backward, which after running out of memory never comes.
        yield (
            f"torch_compile_mode={mode} records CUDA graphs, which keep the memory of a step that did not end: use "
            "max-autotune-no-cudagraphs, or set oom_recovery=False"
        )
    if memory_args.max_tokens_per_batch is not None:
        if memory_args.max_batch_size is not None:
            yield "max_batch_size and max_tokens_per_batch both size micro-batches: leave one of them out"
        if str(fields.get("train_sampling_strategy", "random")) in ("group_by_length", "batch_rebalance"):
            yield "max_tokens_per_batch groups by length already: leave train_sampling_strategy out"
    yield from _of_attention(memory_args)
    yield from _of_checkpointing(memory_args, fields)
    yield from _of_optimizers(memory_args, fields, engine)


def _of_attention(memory_args: MemoryArguments) -> Iterator[str]:
    if memory_args.sparse_block_size is None:
        for name in ("num_local_blocks", "num_global_blocks"):
            if (value := getattr(memory_args, name)) != getattr(MemoryArguments, name):
                yield f"{name}={value} counts blocks of sparse_block_size tokens: set it too, or leave {name} out"
    elif memory_args.sliding_window is not None:
        yield "sparse_block_size and sliding_window both choose what a token attends to: leave one of them out"


def _of_checkpointing(memory_args: MemoryArguments, fields: dict[str, Any]) -> Iterator[str]:
    kwargs = fields.get("activation_checkpointing_kwargs") or {}
    if memory_args.checkpoint_ratio is None and memory_args.checkpoint_keeps is None:
        return
    name = "checkpoint_ratio" if memory_args.checkpoint_ratio is not None else "checkpoint_keeps"
    if kwargs.get("every_n_layers", 1) != 1:
        yield f"every_n_layers={kwargs['every_n_layers']} and {name} both choose what is recomputed: keep one of them"
    if kwargs.get("use_reentrant"):
        yield f"{name} needs activation_checkpointing_kwargs.use_reentrant=False"
    config = fields.get("fsdp_config") or {}
    if isinstance(config, dict) and config.get("activation_checkpointing"):
        yield f"fsdp_config.activation_checkpointing checkpoints every layer: leave it out to use {name}"


def _of_optimizers(memory_args: MemoryArguments, fields: dict[str, Any], engine: str) -> Iterator[str]:
    if memory_args.optimizer_cpu_offload:
        if engine != "none":
            yield (
                f"optimizer_cpu_offload is for one device: leave it out under {engine}, "
                "and use strategy zero2_offload_cpu"
            )
        if memory_args.optimizer_in_backward:
            yield "optimizer_in_backward and optimizer_cpu_offload both replace the step: leave one of them out"
        if fields.get("fp16"):
            yield "optimizer_cpu_offload does not see fp16's scaled gradients: use bf16=True"
        optim = getattr(fields.get("optim"), "value", fields.get("optim")) or ""
        if any(part in optim for part in ("bit", "bnb", "lomo", "layerwise")):
            yield f"optim={optim} has no fast step on the host: use adamw_torch_fused"
    if memory_args.adam_mini and engine in _SHARDING:
        yield f"adam_mini needs whole weights, {engine} keeps parts of them: leave it out"
    if not memory_args.optimizer_in_backward:
        return
    if engine != "none":
        yield f"optimizer_in_backward would use gradients before {engine} reduces them: leave it out"
    if fields.get("gradient_accumulation_steps", 1) > 1:
        yield (
            "optimizer_in_backward updates weights in every backward: set gradient_accumulation_steps=1, "
            "with a larger per_device_train_batch_size"
        )
    if fields.get("max_grad_norm", 1.0):
        yield ("optimizer_in_backward never has all gradients, so their norm cannot be clipped: set max_grad_norm=0")
    if fields.get("fp16"):
        yield "optimizer_in_backward cannot unscale fp16's gradients: use bf16=True"
