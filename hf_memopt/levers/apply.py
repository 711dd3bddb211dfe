"""Apply MemoryArguments to a model and its optimizer; the trainer and the estimator both call this."""

from typing import Any

from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.replaced import replace
from hf_memopt.levers.sharded_gradients import reduce_at_once


def apply_levers(model, memory_args: MemoryArguments, label_smoothing: float = 0.0) -> None:
    """Apply the memory features of MemoryArguments to a model.

    Args:
        label_smoothing: of the loss, for loss_chunk_size.

    Raises:
        InputError: a memory feature does not support this model.
    """
    if memory_args.quantized_experts:
        from hf_memopt.levers.quantized_experts import quantize_experts

        quantize_experts(model)
    if memory_args.sliding_window is not None:
        from hf_memopt.levers.sliding_window import set_window

        set_window(model, memory_args.sliding_window)
    if memory_args.sparse_block_size is not None:
        from hf_memopt.levers.sparse_attention import attend_to_blocks

        attend_to_blocks(
            model, memory_args.sparse_block_size, memory_args.num_local_blocks, memory_args.num_global_blocks
        )
    if memory_args.frozen_without_grad:
        from hf_memopt.levers.frozen_modules import run_frozen_without_grad

        run_frozen_without_grad(model)
    if memory_args.loss_chunk_size is not None:
        from hf_memopt.levers.chunked_loss import chunk_loss

        chunk_loss(model, memory_args.loss_chunk_size, label_smoothing)
    if memory_args.mlp_tile_size is not None:
        from hf_memopt.levers.tiled_mlp import tile_mlps

        tile_mlps(model, memory_args.mlp_tile_size)
    if memory_args.logits_to_keep:
        from hf_memopt.levers.answer_logits import keep_answer_logits

        keep_answer_logits(model)
    from hf_memopt.levers.selective_checkpointing import checkpoint_in_part, keep_chosen_layers

    keep_chosen_layers(model)
    if memory_args.checkpoint_ratio is not None or memory_args.checkpoint_keeps is not None:
        checkpoint_in_part(model, memory_args.checkpoint_ratio, memory_args.checkpoint_keeps)
    if memory_args.weight_streaming:
        from hf_memopt.levers.weight_streaming import stream_weights

        stream_weights(model, memory_args.weight_streaming_ratio)
    if memory_args.activation_offload:
        from hf_memopt.levers.activation_offload import offload_activations

        offload_activations(model, compressed=memory_args.activation_compression is not None)
    elif memory_args.activation_compression is not None:
        from hf_memopt.levers.activation_compression import compress_activations

        compress_activations(model)


def apply_to_trainer(trainer, memory_args: MemoryArguments, **host) -> None:
    """Apply the memory features of MemoryArguments to a trainer's optimizer and gradients.

    Args:
        host: keyword arguments of keep_on_host(), for optimizer_cpu_offload.
    """
    reduce_at_once(trainer)
    if memory_args.adam_mini or memory_args.optimizer_in_backward or memory_args.optimizer_cpu_offload:
        replace(trainer, "create_optimizer", _creating(trainer, memory_args, host))


def _creating(trainer, memory_args: MemoryArguments, host: dict[str, Any]):
    """A create_optimizer() that modifies the optimizer once, whether the trainer creates it or was given it."""
    create, changed = trainer.create_optimizer, []

    def create_changed(*args, **kwargs):
        if memory_args.adam_mini and trainer.optimizer is None:
            from hf_memopt.levers.adam_mini import AdamMini, settings_for

            trainer.optimizer_cls_and_kwargs = AdamMini, settings_for(trainer.model, trainer.args)
        optimizer = create(*args, **kwargs)
        if not any(optimizer is other for other in changed):
            changed.append(optimizer)
            _change(optimizer, memory_args, host)
        return optimizer

    return create_changed


def _change(optimizer, memory_args: MemoryArguments, host: dict[str, Any]) -> None:
    if memory_args.optimizer_in_backward:
        from hf_memopt.levers.optimizer_in_backward import step_in_backward

        step_in_backward(optimizer)
    if memory_args.optimizer_cpu_offload:
        from hf_memopt.levers.optimizer_cpu_offload import keep_on_host

        keep_on_host(optimizer, **host)
