"""Quantize saved activations to 8 bits, block by block: half the bytes of bf16, a quarter of fp32.

Each block of 128 elements, in memory order, is scaled by its own largest magnitude, so an outlier affects its block
only; the error of an element is at most 1/254 of that magnitude. The forward pass is exact: only gradients are
computed from dequantized tensors. Alone it applies to what every operator saves; with activation checkpointing, to the
layers' inputs.
"""

import functools
import logging
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memopt.levers.saved_tensors import is_dense, location, save_through, weight_storages

logger = logging.getLogger(__name__)

_BLOCK = 128  # elements per scale, which adds 1/32 byte per element
_SMALLEST = 4096  # elements; smaller tensors are kept uncompressed
_AT_ONCE = 1 << 22  # elements quantized at a time, which bounds temporaries
_LARGEST_CODE = 127  # of int8, symmetric about 0


def compress_activations(model: torch.nn.Module) -> "Compressor":
    """Compress a model's saved tensors to 8 bits while it trains."""
    compressor = Compressor()
    save_through(model, compressor)
    return compressor


class Compressed:
    """A tensor in 8 bits.

    Attributes:
        codes: (blocks, 128), int8.
        scales: (blocks, 1), fp32.
        rest: the last elements, fewer than a block, uncompressed.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        # While it is referenced, no other storage gets its address.
        self.source = StorageWeakRef(tensor.untyped_storage())
        flat = (tensor if is_dense(tensor) else tensor.contiguous()).as_strided((tensor.numel(),), (1,))
        end = len(flat) // _BLOCK * _BLOCK
        blocks = flat[:end].view(-1, _BLOCK)
        self.dtype, self.rest = tensor.dtype, flat[end:].clone()
        self.codes = torch.empty(blocks.shape, dtype=torch.int8, device=tensor.device)
        self.scales = torch.empty((len(blocks), 1), dtype=torch.float32, device=tensor.device)
        quantize, _ = _kernels(tensor.device.type)
        for rows in _slices(len(blocks)):
            self.codes[rows], self.scales[rows] = quantize(blocks[rows])

    def decompress(self, codes: torch.Tensor | None = None) -> torch.Tensor:
        """The dequantized elements as a vector.

        Args:
            codes: by default its own; those that were offloaded and fetched again.
        """
        codes = self.codes if codes is None else codes
        flat = torch.empty(codes.numel() + len(self.rest), dtype=self.dtype, device=codes.device)
        end = codes.numel()
        blocks = flat[:end].view(-1, _BLOCK)
        _, restore = _kernels(codes.device.type)
        for rows in _slices(len(blocks)):
            restore(codes[rows], self.scales[rows], blocks[rows])
        flat[end:] = self.rest
        return flat


class Compressor:
    """A Keeper that compresses activations; weights, masks and statistics, which must be exact, pass unchanged."""

    def __init__(self) -> None:
        self._weights: set[int] = set()
        self._shapes: set[tuple] = set()
        self._vocabulary = 0
        self._tokens = 0
        self._heads: tuple = ()
        self._alive: WeakValueDictionary[tuple, Compressed] = WeakValueDictionary()

    def begin(self, model, inputs) -> None:
        self._weights = weight_storages(model)
        self._shapes = {tuple(weight.shape) for weight in (*model.parameters(), *model.buffers()) if weight.dim() == 2}
        config = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._vocabulary = getattr(text, "vocab_size", 0)
        self._tokens = max((tensor.shape[0] * tensor.shape[1] for tensor in inputs if tensor.dim() > 1), default=0)

    def end(self) -> None:
        pass

    def pack(self, tensor):
        if not self._is_compressible(tensor):
            return tensor
        key = location(tensor)
        compressed = self._alive.get(key)
        if compressed is None:
            compressed = self._alive[key] = Compressed(tensor)
        stride = tensor.stride() if is_dense(tensor) else tensor.contiguous().stride()
        return compressed, tensor.shape, stride

    def unpack(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        compressed, shape, stride = saved
        return compressed.decompress().as_strided(shape, stride)

    def _is_compressible(self, tensor: torch.Tensor) -> bool:
        heads, self._heads = self._heads, tensor.shape[:-1] if tensor.dim() in (3, 4) else self._heads
        return (
            tensor.is_floating_point()
            and tensor.element_size() in (2, 4)
            and tensor.numel() >= _SMALLEST
            and tensor.shape[-1] not in (1, self._vocabulary)  # statistics of rows; logarithms of probabilities
            and 0 not in tensor.stride()
            and not is_traceable_wrapper_subclass(tensor)
            and not self._is_mask(tensor)
            and not _is_log_sum_exp(tensor, heads)
            and not self._is_weight(tensor)
        )

    @staticmethod
    def _is_mask(tensor: torch.Tensor) -> bool:
        """True if it is an additive attention mask, (batch, 1, queries, keys)."""
        return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[-1] >= tensor.shape[-2] > 1

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """True if it is a weight, a view of one, or autocast's copy of one."""
        if tensor.untyped_storage()._cdata in self._weights:
            return True
        if tensor.dim() != 2:
            return False
        turned = tensor.stride(0) == 1 and tuple(tensor.shape[::-1]) in self._shapes
        return turned or (tuple(tensor.shape) in self._shapes and len(tensor) != self._tokens)


def _is_log_sum_exp(tensor: torch.Tensor, heads: tuple) -> bool:
    """True if it is attention's log-sum-exp, (batch, heads, tokens), which backward makes the probabilities from.
    Some kernels pad the tokens, or order the dimensions differently."""
    if tensor.dim() == 3 and len(heads) == 3:
        return tuple(tensor.shape[:2]) == tuple(heads[:2])
    return tensor.dim() == 2 and len(heads) == 2 and tuple(tensor.shape) == tuple(heads[::-1])


def _slices(blocks: int):
    step = _AT_ONCE // _BLOCK
    return (slice(start, start + step) for start in range(0, blocks, step))


def _quantize(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize blocks, (blocks, 128), to int8 codes of the same shape and fp32 scales, (blocks, 1)."""
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1, keepdim=True).float() / _LARGEST_CODE
    return (blocks / scales.clamp_min(1e-30)).round_().to(torch.int8), scales


def _restore(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(codes * scales)


@functools.cache
def _kernels(device_type: str):
    """Quantize and dequantize; on CUDA each fused into one kernel by torch.compile, where that works."""
    if device_type != "cuda":
        return _quantize, _restore
    try:
        fused = torch.compile(_quantize, dynamic=True), torch.compile(_restore, dynamic=True)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            example = torch.ones(3, _BLOCK, dtype=dtype, device=device_type)
            fused[1](*fused[0](example), example)
        return fused
    except Exception as error:  # a compiler may raise anything; without it the result is the same, only slower
        logger.warning("activation_compression runs unfused, torch.compile failed: %s", str(error)[:200])
        return _quantize, _restore
