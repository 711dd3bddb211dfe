"""PEFT's adapters on fake tensors: the places where peft 0.21 asks a tensor for its value.

Each replacement allocates what the original allocates and keeps what it keeps for backward.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_memopt.estimator.accounting.known_values import set_value
from hf_memopt.estimator.private_names import Part


@contextmanager
def traceable_adapters() -> Iterator[None]:
    """Called in the fake world, before adapters are added; without peft there is nothing to replace."""
    if "peft" not in sys.modules:
        yield
        return
    with (
        _BLOCKS.replaced(torch=_TorchWithout(unbind=lambda blocks: (blocks,), block_diag=_BlockDiagonal.apply)),
        _PERMUTATION.replaced(perm2mat=lambda layer, order: torch.empty(len(order), len(order))),
        _MASK.replaced(update_layer=_without_mask(_MASK.original("update_layer"))),
        _SPARSE_DELTA.replaced(get_delta_weight=_shira_delta),
        _SCALES.replaced(_assign_unilora_indices_and_scales=_assign_scales),
        _DECOMPOSED.replaced(
            _init_frod_projections=_make_projections,
            _calculate_frod_u_and_lambda=lambda layer, projection, weight: (
                torch.empty(weight.shape[0], projection.shape[0]),
                torch.empty(projection.shape[0]),
            ),
        ),
        _SPARSE.replaced(_get_frod_tensors=_frod_tensors, _sparse_activation_mm=_sparse_matmul),
    ):
        yield


_BLOCKS = Part.PEFT.replaces(
    "peft.tuners.boft.layer:torch",
    why="block_diag of thousands of blocks takes minutes on fake tensors (0.21)",
    until="torch's fake kernel takes them at once",
)
_PERMUTATION = Part.PEFT.replaces(
    "peft.tuners.boft.layer:BOFTLayer.perm2mat(self, indices)",
    why="writes a permutation element by element, which takes seconds on fake tensors (0.21)",
    until="peft makes them by indexing",
)


class _TorchWithout:
    """The torch module as one file of peft sees it, with some functions replaced."""

    def __init__(self, **replaced):
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(torch, name)


class _BlockDiagonal(torch.autograd.Function):
    """torch.block_diag of all blocks at once. BOFT has hidden_size / 4 of them, and torch passes them to a fake kernel
    one by one, which takes minutes for a 3B model."""

    @staticmethod
    def forward(ctx, blocks):
        ctx.shape = blocks.shape
        count, size, _ = blocks.shape
        return blocks.new_zeros(count * size, count * size)

    @staticmethod
    def backward(ctx, grad):
        return grad.new_empty(ctx.shape)


_MASK = Part.PEFT.replaces(
    "peft.tuners.shira.layer:ShiraLayer.update_layer(self, adapter_name, mask, r)",
    why="asks a mask for the places of its ones, whose number is known",
    until="peft passes indices",
)


def _without_mask(update_layer):
    def update(layer, adapter_name, mask, r, **kwargs):
        update_layer(layer, adapter_name, None, r, **kwargs)
        if mask is not None:
            count = layer.shira_weight[adapter_name].numel()
            layer.shira_indices[adapter_name] = torch.empty(2, count, dtype=torch.int)

    return update


_SPARSE_DELTA = Part.PEFT.replaces(
    "peft.tuners.shira.layer:Linear.get_delta_weight(self, adapter)",
    why="a sparse tensor has no storage that a fake one could stand for",
    until="the ledger counts sparse tensors",
)


def _shira_delta(layer, adapter: str) -> torch.Tensor:
    """SHiRA's sparse matrix as a dense one."""
    indices = layer.shira_indices[adapter].to(torch.int64)
    values = layer.shira_weight[adapter] * layer.scaling[adapter]
    return _Scatter.apply(values, indices, (layer.out_features, layer.in_features))


class _Scatter(torch.autograd.Function):
    """A dense matrix of sparse values that takes no memory of its own: its addition reads the values."""

    @staticmethod
    def forward(ctx, values, indices, shape):
        ctx.save_for_backward(indices)
        return values.new_empty(()).expand(shape)

    @staticmethod
    def backward(ctx, grad):
        (indices,) = ctx.saved_tensors
        return grad[indices[0], indices[1]], None, None


_SCALES = Part.PEFT.replaces(
    "peft.tuners.unilora.model:UniLoraModel._assign_unilora_indices_and_scales(self, adapter_name)",
    why="counts indices with bincount",
    until="fake tensors have values that shapes decide",
    since="0.20",
)


def _assign_scales(model, adapter_name: str) -> None:
    """UniLoRA counts how often each shared weight is used, for a scale per element of A and B."""
    for module in model._iter_unilora_layers():
        if adapter_name in module.unilora_indices_A:
            indices = module.unilora_indices_A[adapter_name], module.unilora_indices_B[adapter_name]
            module.update_scaling(adapter_name, *(torch.empty(index.shape) for index in indices))


_DECOMPOSED = Part.PEFT.replaces(
    "peft.tuners.frod.model:FrodModel._init_frod_projections(self, config, adapter_name)",
    "peft.tuners.frod.layer:FrodLayer._calculate_frod_u_and_lambda(self, V, W)",
    why="decomposes the weights' values",
    since="0.20",
)


def _make_projections(model, config, adapter_name: str) -> None:
    """FRoD's projections, shared by all layers of a kind."""
    from peft.tuners._buffer_dict import BufferDict
    from peft.tuners.frod.model import _category_from_key
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers

    peft_config = model._prepare_adapter_config(config, model.get_model_config(model.model))
    peft_config = _maybe_include_all_linear_layers(peft_config, model.model)
    for name in ("frod_V", "frod_s_indices", "frod_s_size"):
        if not hasattr(model, name):
            setattr(model, name, torch.nn.ModuleDict())
    for key, module in model.model.named_modules():
        if not isinstance(module, torch.nn.Linear) or not model._check_target_module_exists(peft_config, key):
            continue
        category, size = _category_from_key(key), module.in_features
        if category in model.frod_V:
            continue
        count = min(int(size * size * config.sparse_rate), size * (size - 1))
        count = max(1, count) if config.sparse_rate > 0 and size > 1 else count
        shared = {
            "frod_V": torch.empty(size, size, dtype=module.weight.dtype),
            "frod_s_indices": torch.empty(2, count, dtype=torch.long),
            "frod_s_size": set_value(torch.empty(2, dtype=torch.long), torch.tensor([size, size])),
        }
        for name, tensor in shared.items():
            getattr(model, name)[category] = BufferDict({adapter_name: tensor}, persistent=config.save_projection)


_SPARSE = Part.PEFT.replaces(
    "peft.tuners.frod.layer:Linear._get_frod_tensors(self, adapter)",
    "peft.tuners.frod.layer:Linear._sparse_activation_mm(self, z_flat, S_sparse)",
    why="a sparse tensor has no storage that a fake one could stand for",
    until="the ledger counts sparse tensors",
    since="0.20",
)


def _frod_tensors(layer, adapter: str, *, device, dtype):
    """U, V, the sparse S as its values, and the diagonal."""
    names = ("frod_U", "frod_V", "frod_lambda_s_values", "frod_lambda_l")
    left, right, values, diagonal = (getattr(layer, name)[adapter].to(dtype=dtype) for name in names)
    indices = layer.frod_s_indices[adapter].clone()  # coalesce() sorts a copy
    return left, right, (indices, values, (layer.in_features, layer.in_features)), diagonal


def _sparse_matmul(layer, activations, sparse):
    """In 16 bits peft multiplies by the dense matrix, in 32 bits by the sparse one."""
    indices, values, shape = sparse
    if activations.dtype in (torch.float16, torch.bfloat16):
        return activations @ _Dense.apply(values, indices, shape).t()
    return _SparseMatmul.apply(values, indices, activations)


class _Dense(_Scatter):
    @staticmethod
    def forward(ctx, values, indices, shape):
        ctx.save_for_backward(indices)
        return values.new_zeros(shape)


class _SparseMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, indices, activations):
        ctx.save_for_backward(values, indices, activations)
        return torch.empty_like(activations)

    @staticmethod
    def backward(ctx, grad):
        values, _, activations = ctx.saved_tensors
        return torch.empty_like(values), None, torch.empty_like(activations)
