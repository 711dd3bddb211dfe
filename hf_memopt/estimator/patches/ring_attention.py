"""Trace a process that has a part of every sample's tokens, and in attention the others' keys and values."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.errors import InputError
from hf_memopt.estimator.private_names import Part

_INPUTS = Part.CONTEXT_PARALLEL.replaces(
    "transformers:Trainer._prepare_context_parallel_inputs(self, model, inputs)",
    why="asks accelerate to divide batches, which it does on accelerators only (1.15)",
    until="accelerate starts FSDP2 on the CPU",
)
_MASKS = Part.CONTEXT_PARALLEL.relies_on(
    "accelerate.big_modeling:_attach_context_parallel_hooks(model)",
    why="takes the masks from a model's attention, as accelerate does where it divides batches",
    until="accelerate starts FSDP2 on the CPU",
)
_EXCHANGES = Part.CONTEXT_PARALLEL.relies_on(
    "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention"
    "(group, seq_dim, op, query, key, value, is_causal)",
    "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention_backward"
    "(group, seq_dim, op, grad_out, grad_out_name, query, key, value, out, logsumexp, is_causal)",
    why="the ring itself, around any kernel",
    until="torch has a ring for the CPU's kernel",
)
_aten = torch.ops.aten
_ENABLED = SimpleNamespace(cp_enabled=True, cp_backend="torch")  # as the Trainer asks accelerate's ParallelismConfig


def ring_attention(model, processes: int, world_size: int) -> AbstractContextManager:
    """Divide a Trainer's batches, and have attention exchange keys and values over the fake process group.

    Accelerator._prepare_cp (accelerate 1.15) does it on accelerators only, and torch's attention around the ring knows
    their kernels alone: the CPU's takes their place, which counts as CUDA's flash attention.

    Args:
        processes: that share a sample.
    """
    if processes == 1:
        return nullcontext()
    from accelerate.big_modeling import _attach_context_parallel_hooks

    sizes = world_size // processes, processes
    with _disable_current_modes():  # ranks need values
        group = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_shard", "cp"))["cp"].get_group()
    prepare = _INPUTS.original("_prepare_context_parallel_inputs")
    attention = {"scaled_dot_product_attention": attention_around(group)}

    def divided(trainer, model, inputs):
        with mock.patch.object(trainer.accelerator.state, "parallelism_config", _ENABLED):
            context, inputs = prepare(trainer, model, inputs)
        whole, axes = context.keywords["buffers"], context.keywords["buffer_seq_dims"]
        cut = [tensor.chunk(processes, axis)[0].clone() for tensor, axis in zip(whole, axes, strict=True)]
        parts = dict(zip(map(id, whole), cut, strict=True))
        inputs = {name: parts.get(id(value), value) for name, value in inputs.items()}
        # Resized in place, what was whole keeps its storage (torch 2.13, context_parallel).
        return partial(_held, whole, mock.patch.multiple(torch.nn.functional, **attention)), inputs

    _attach_context_parallel_hooks(model)
    return _INPUTS.replaced(_prepare_context_parallel_inputs=divided)


@contextmanager
def _held(tensors: list[torch.Tensor], context: AbstractContextManager) -> Iterator[None]:
    """A context in which the tensors stay."""
    with context:
        yield


def attention_around(group) -> Callable:
    """torch.nn.functional.scaled_dot_product_attention on tensors of (batch, heads, tokens, size), of whose tokens
    each process of the group has a part."""

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if attn_mask is not None:
            raise InputError("context parallelism takes causal attention alone: this model gives it a mask")
        return _Ring.apply(query, key, value, is_causal, scale, group)

    return attention


class _Ring(torch.autograd.Function):
    """torch's ring of exchanges, around the CPU's flash attention."""

    @staticmethod
    def forward(ctx, query, key, value, is_causal, scale, group):
        attend = _EXCHANGES.original("_templated_ring_attention")
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu.default
        out, logsumexp = attend(group, 2, kernel, query, key, value, is_causal=is_causal, scale=scale)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.settings = is_causal, scale, group
        return out

    @staticmethod
    def backward(ctx, gradient):
        attend = _EXCHANGES.original("_templated_ring_attention_backward")
        kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        is_causal, scale, group = ctx.settings
        arguments = {"is_causal": is_causal, "scale": scale, "dropout_p": 0.0}
        gradients = attend(group, 2, kernel, gradient, "grad_out", *ctx.saved_tensors, **arguments)
        return *gradients[:3], None, None, None
