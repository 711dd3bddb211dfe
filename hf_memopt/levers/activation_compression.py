"""Saved activations in 8 bits: blocks of integers with a scale each, half the bytes of bf16, a quarter of fp32.

A tensor is divided into blocks of 128 elements in the order of memory, each with the largest magnitude of its own as
scale, so that an outlier spoils no more than its block; the error of an element is at most 1/254 of that magnitude.
Forward passes are exact, only gradients are computed from the restored tensors. Alone it replaces what every operator
saves; with activation checkpointing it replaces what layers keep, their inputs.
"""

import functools
import logging
from weakref import WeakValueDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_memopt.levers.saved_tensors import is_dense, place, save_through, storages_of

logger = logging.getLogger(__name__)

_BLOCK = 128  # elements of a scale: 1/32 byte an element more
_SMALLEST = 4096  # elements; below, a tensor is kept as it is
_AT_ONCE = 1 << 22  # elements that are worked on at a time, which bounds what is needed on the way
_LARGEST_CODE = 127


def compress_activations(model: torch.nn.Module) -> "Compressor":
    """Keep what a model's operators save in 8 bits while it trains."""
    compressor = Compressor()
    save_through(model, compressor)
    return compressor


class Compressed:
    """A tensor in 8 bits.

    Attributes:
        codes: int8, the blocks one after the other.
        scales: fp32, one a block.
        rest: the last elements, fewer than a block, as they were.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.source = StorageWeakRef(tensor.untyped_storage())  # keeps another storage from getting this one's number
        flat = (tensor if is_dense(tensor) else tensor.contiguous()).as_strided((tensor.numel(),), (1,))
        whole = len(flat) // _BLOCK * _BLOCK
        blocks = flat[:whole].view(-1, _BLOCK)
        self.dtype, self.rest = tensor.dtype, flat[whole:].clone()
        self.codes = torch.empty(blocks.shape, dtype=torch.int8, device=tensor.device)
        self.scales = torch.empty((len(blocks), 1), dtype=torch.float32, device=tensor.device)
        quantize, _ = _kernels(tensor.device.type)
        for rows in _slices(len(blocks)):
            self.codes[rows], self.scales[rows] = quantize(blocks[rows])

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales, self.rest))

    def restored(self, codes: torch.Tensor | None = None) -> torch.Tensor:
        """The elements as a vector, nearly what they were.

        Args:
            codes: by default its own.
        """
        codes = self.codes if codes is None else codes
        flat = torch.empty(codes.numel() + len(self.rest), dtype=self.dtype, device=codes.device)
        whole = codes.numel()
        blocks = flat[:whole].view(-1, _BLOCK)
        _, restore = _kernels(codes.device.type)
        for rows in _slices(len(blocks)):
            restore(codes[rows], self.scales[rows], blocks[rows])
        flat[whole:] = self.rest
        return flat


class Compressor:
    """A Keeper that compresses activations, and leaves alone what is none or must be exact.

    Attributes:
        taken_bytes: of the tensors compressed in the last forward pass.
        kept_bytes: what became of them.
    """

    def __init__(self) -> None:
        self.taken_bytes = self.kept_bytes = 0
        self._weights: set[int] = set()
        self._shapes: set[tuple] = set()
        self._vocabulary = 0
        self._tokens = 0
        self._heads: tuple = ()
        self._alive: WeakValueDictionary[tuple, Compressed] = WeakValueDictionary()

    def begin(self, model, inputs) -> None:
        self._weights = storages_of(model)
        self._shapes = {tuple(weight.shape) for weight in (*model.parameters(), *model.buffers()) if weight.dim() == 2}
        config = getattr(model, "config", None)
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        self._vocabulary = getattr(text, "vocab_size", 0)
        self._tokens = max((tensor.shape[0] * tensor.shape[1] for tensor in inputs if tensor.dim() > 1), default=0)
        self.taken_bytes = self.kept_bytes = 0

    def end(self) -> None:
        pass

    def pack(self, tensor):
        if not self._is_taken(tensor):
            return tensor
        key = place(tensor)
        compressed = self._alive.get(key)
        if compressed is None:
            compressed = self._alive[key] = Compressed(tensor)
            self.taken_bytes += tensor.numel() * tensor.element_size()
            self.kept_bytes += compressed.nbytes
        stride = tensor.stride() if is_dense(tensor) else tensor.contiguous().stride()
        return compressed, tensor.shape, stride

    def unpack(self, kept):
        if isinstance(kept, torch.Tensor):
            return kept
        compressed, shape, stride = kept
        return compressed.restored().as_strided(shape, stride)

    def _is_taken(self, tensor: torch.Tensor) -> bool:
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
        """Whether it is what is added to attention scores, for all heads at once."""
        return tensor.dim() == 4 and tensor.shape[1] == 1 and tensor.shape[-1] >= tensor.shape[-2] > 1

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Whether it is a weight, a view of one, or one in autocast's type."""
        if tensor.untyped_storage()._cdata in self._weights:
            return True
        if tensor.dim() != 2:
            return False
        turned = tensor.stride(0) == 1 and tuple(tensor.shape[::-1]) in self._shapes
        return turned or (tuple(tensor.shape) in self._shapes and len(tensor) != self._tokens)


def _is_log_sum_exp(tensor: torch.Tensor, heads: tuple) -> bool:
    """Whether attention saved it beside queries, keys and values: a number a row of (batch, heads, tokens), by which
    its backward pass finds the probabilities again. Kernels pad the tokens, or put them last."""
    if tensor.dim() == 3 and len(heads) == 3:
        return tuple(tensor.shape[:2]) == tuple(heads[:2])
    return tensor.dim() == 2 and len(heads) == 2 and tuple(tensor.shape) == tuple(heads[::-1])


def _slices(blocks: int):
    step = _AT_ONCE // _BLOCK
    return (slice(start, start + step) for start in range(0, blocks, step))


def _quantize(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (blocks, 128) in int8 and scales (blocks, 1) in fp32 of blocks (blocks, 128)."""
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=1, keepdim=True).float() / _LARGEST_CODE
    return (blocks / scales.clamp_min(1e-30)).round_().to(torch.int8), scales


def _restore(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(codes * scales)


@functools.cache
def _kernels(device_type: str):
    """Both functions, each in one kernel on CUDA where torch.compile works."""
    if device_type != "cuda":
        return _quantize, _restore
    try:
        fused = torch.compile(_quantize, dynamic=True), torch.compile(_restore, dynamic=True)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            example = torch.ones(3, _BLOCK, dtype=dtype, device=device_type)
            fused[1](*fused[0](example), example)
        return fused
    except Exception as error:  # whatever a compiler may raise: it is faster with it, and right without
        logger.warning("activation_compression runs in several kernels, torch.compile fails: %s", str(error)[:200])
        return _quantize, _restore
