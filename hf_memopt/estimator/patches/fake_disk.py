"""Stands in for DeepSpeed's NVMe access on fake tensors: buffers take host memory, reads and writes finish at once."""

from types import SimpleNamespace

import torch

from hf_memopt.estimator.accounting.ledger import HOST


class Handle:
    """The memory side of deepspeed's `aio_handle` (csrc/aio/py_lib, 0.19.8)."""

    def __init__(self, ledger):
        self._ledger = ledger
        self._pending = 0
        self._locked: set[int] = set()

    def new_cpu_locked_tensor(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """Allocate a page-locked buffer."""
        with self._ledger.counting_as(HOST):
            buffer = torch.empty(size, dtype=like.dtype)
        self._locked.add(buffer.untyped_storage()._cdata)
        return buffer

    def free_cpu_locked_tensor(self, _) -> bool:
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._locked

    def wait(self) -> int:
        done, self._pending = self._pending, 0
        return done

    def _at_once(self, *_) -> int:
        self._pending += 1
        return 0

    async_pread = async_pwrite = _at_once


def loader(ledger):
    """A replacement of AsyncIOBuilder.load()."""
    return lambda *_, **__: SimpleNamespace(aio_handle=lambda *_, **__: Handle(ledger))
