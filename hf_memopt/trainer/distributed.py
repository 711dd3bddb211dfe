"""What the processes of one job tell each other about memory, beside the gradients: sizes to agree on, and the end."""

import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import torch
from torch import distributed

from hf_memopt.errors import EXIT_OUT_OF_MEMORY

_NO_LIMIT = 2**62
_ENDED, _SAVED = "hf_memopt/out_of_memory", "hf_memopt/saved"
_POLL = 0.5  # seconds
_FILES = 20.0  # seconds that the first process waits for the others' random states
_SAVING = 600.0  # seconds that a process waits for the first one to save
_GOOD_BYE = 2.0  # seconds that the first process stays: it may be the one that keeps the store


class Peers:
    """This process among the processes of its job; of no effect where it is alone.

    Attributes:
        wait_on_host: a process that waits for another one blocks its thread (gloo), not its device's stream (NCCL).
    """

    def __init__(self, accelerator) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.wait_on_host = True
        self._watched = False
        self._device = accelerator.device
        self._group = None
        if self.alone:
            return
        # Agreements are made on the host, so that they wait for no device.
        if distributed.get_backend() != "gloo":
            self.wait_on_host = False
            self._group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
        store = distributed.distributed_c10d._get_default_store()
        self._store = store.clone()  # a connection of its own: the other one may be waiting

    @property
    def alone(self) -> bool:
        """Whether this is the only process."""
        return self.size <= 1 or not distributed.is_initialized()

    def smallest(self, elements: int | None) -> int | None:
        """The smallest limit that any process has; None where none has one."""
        found = torch.tensor(_NO_LIMIT if elements is None else elements, dtype=torch.int64)
        distributed.all_reduce(found, op=distributed.ReduceOp.MIN, group=self._group)
        return None if int(found) == _NO_LIMIT else int(found)

    def announce(self, message: str, elements: int | None) -> None:
        """Tell the others that this process has no memory to continue, and what limit would have helped.

        Outside of train() nobody watches, and the store would keep the message for the next one.
        """
        if not self.alone and self._watched:
            said = {"process": self.rank, "message": message, "elements": elements}
            self._store.set(_ENDED, json.dumps(said))

    def out_of_memory(self) -> dict | None:
        """What a process that ran out of memory has said (`process`, `message`, `elements`); None where none has.

        A store that is gone says nothing: the process that kept it may have died of anything.
        """
        try:
            return json.loads(self._store.get(_ENDED)) if self._store.check([_ENDED]) else None
        except RuntimeError:
            return None

    @contextmanager
    def watching(self, save: Callable[[int | None], object]):
        """While it is open, this process ends soon after another announces that it ran out of memory.

        The others wait in a reduction for gradients that never come; a thread of its own saves and ends the process.
        It is over before the interpreter is: a thread that returns from the store after that aborts the process.

        Args:
            save: called with the limit that would have helped.
        """
        if self.alone:
            yield
            return
        over = threading.Event()
        self._watched = True
        thread = threading.Thread(target=self._watch, args=(save, over), name="hf_memopt peers", daemon=True)
        thread.start()
        try:
            yield
        except Exception:
            # The reduction may have failed only because another process ran out of memory and ended.
            if (said := self.out_of_memory()) and said["process"] != self.rank:
                self._leave(said)
            raise
        finally:
            self._watched = False
            over.set()
            thread.join()

    def _watch(self, save, over: threading.Event) -> None:
        while not (said := self.out_of_memory()):
            if over.wait(_POLL):
                return
        if said["process"] == self.rank:
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # torch's current device belongs to a thread
        save(said["elements"])
        self._leave(said)

    def saved(self, checkpoint: str | None) -> str | None:
        """After a process has written its part of the last checkpoint: the first one says where, the others wait.

        Returns:
            The checkpoint of all: the first process's. This process's own where the first one says nothing, or nobody
            watches, as in an evaluation outside of train().
        """
        if self.alone or not self._watched:
            return checkpoint
        try:
            if self.rank == 0:
                self._store.set(_SAVED, checkpoint or "")
                time.sleep(_GOOD_BYE)
                return checkpoint
            self._store.wait([_SAVED], datetime.timedelta(seconds=_SAVING))
            return self._store.get(_SAVED).decode() or None
        except RuntimeError:  # the first process is gone, and with it the store
            return checkpoint

    def _leave(self, said: dict) -> NoReturn:
        """End this process, which waits for one that is gone, with the exit code for relaunchers."""
        print(f"out of memory in process {said['process']}, this one ends too: {said['message']}", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(EXIT_OUT_OF_MEMORY)  # an open process group would wait for its peers

    def wait_for_files(self, folder: Path, pattern: str) -> None:
        """Wait, some seconds at most, until every process has written its file."""
        end = time.monotonic() + _FILES
        while not self.alone and len(list(folder.glob(pattern))) < self.size and time.monotonic() < end:
            time.sleep(0.1)
