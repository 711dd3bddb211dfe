"""Writes a safetensors file tensor by tensor; safetensors' own writer needs all tensors of a file at once."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

# The names of dtypes in a safetensors header (huggingface/safetensors, safetensors/src/tensor.rs).
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED = 8  # bytes: the header is padded to a multiple, so that tensors can be mapped into memory


def write_tensors(
    path: Path, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], tensors: Iterable[torch.Tensor]
) -> None:
    """Write a safetensors file, holding one tensor at a time.

    Args:
        layout: name -> (shape, dtype), in the order in which the tensors follow.
        tensors: contiguous or not; of the shapes and dtypes of the layout.

    Raises:
        ValueError: a tensor is not what the layout says.
    """
    with path.open("wb") as file:
        entries: dict = {"__metadata__": {"format": "pt"}}  # transformers refuses files without a format
        end = 0
        for name, (shape, dtype) in layout.items():
            begin, end = end, end + count_bytes(shape, dtype)
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        file.write(len(text).to_bytes(8, "little") + text)
        for (name, (shape, dtype)), tensor in zip(layout.items(), tensors, strict=True):
            if (tuple(tensor.shape), tensor.dtype) != (tuple(shape), dtype):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}; its header says {dtype} {tuple(shape)}"
                )
            if tensor.numel():
                # NumPy has no bfloat16: the bytes are written through a view.
                file.write(memoryview(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))


def count_bytes(shape: Iterable[int], dtype: torch.dtype) -> int:
    """The bytes of a tensor."""
    return torch.Size(shape).numel() * dtype.itemsize
