"""Stands for DeepSpeed's disk access on fake tensors: buffers take their memory, and reads and writes are done at
once."""

from types import SimpleNamespace

import torch

from hf_memopt.estimator.accounting.ledger import HOST


class Handle:
    """What deepspeed's `aio_handle` (csrc/aio/py_lib) does, as far as memory is concerned."""

    def __init__(self, ledger):
        self._ledger = ledger
        self._pending = 0
        self._locked: set[int] = set()

    def new_cpu_locked_tensor(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer that stays in host memory."""
        with self._ledger.booking(HOST):
            made = torch.empty(size, dtype=like.dtype)
        self._locked.add(made.untyped_storage()._cdata)
        return made

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
    """What takes the place of AsyncIOBuilder.load()."""
    return lambda *_, **__: SimpleNamespace(aio_handle=lambda *_, **__: Handle(ledger))
