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

import torch
from torch import distributed

from hf_memopt.training.exhausted import EXIT_CODE

_NO_LIMIT = 2**62
_ENDED, _SAVED = "hf_memopt/out_of_memory", "hf_memopt/saved"
_POLL = 0.5  # seconds
_FILES = 20.0  # seconds that the first process waits for the others' random states
_SAVING = 600.0  # seconds that a process waits for the first one to save


class Peers:
    """This process among the processes of its job; of no effect where it is alone."""

    def __init__(self, accelerator) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self._group = None
        if self.alone:
            return
        # Agreements are made on the host, so that they wait for no device.
        if distributed.get_backend() != "gloo":
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
        """Tell the others that this process cannot go on, and what limit would have helped."""
        if not self.alone:
            said = {"process": self.rank, "message": message, "elements": elements}
            self._store.set(_ENDED, json.dumps(said))

    def ended(self) -> dict | None:
        """What a process that cannot go on has said (`process`, `message`, `elements`); None while all go on."""
        try:
            return json.loads(self._store.get(_ENDED)) if self._store.check([_ENDED]) else None
        except RuntimeError as gone:
            message = f"the connection to the first process is lost ({str(gone)[:80]})"
            return {"process": 0, "message": message, "elements": None}

    @contextmanager
    def watching(self, save: Callable[[int | None], object]):
        """While it is open, this process ends soon after another announces that it cannot go on.

        The others wait in a reduction for gradients that never come; a thread of its own saves and ends the process.
        It is over before the interpreter is: a thread that returns from the store after that aborts the process.

        Args:
            save: called with the limit that would have helped.
        """
        if self.alone:
            yield
            return
        over = threading.Event()
        thread = threading.Thread(target=self._watch, args=(save, over), name="hf_memopt peers", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _watch(self, save, over: threading.Event) -> None:
        while not (said := self.ended()):
            if over.wait(_POLL):
                return
        if said["process"] != self.rank:
            save(said["elements"])
            self.leave(f"process {said['process']}: {said['message']}")

    def leave(self, message: str) -> None:
        """End the process, once the first one has saved, with the exit code for relaunchers."""
        try:
            if self.rank == 0:
                self._store.set(_SAVED, "1")
                time.sleep(4 * _POLL)  # it may be the one that keeps the store
            else:
                self._store.wait([_SAVED], datetime.timedelta(seconds=_SAVING))
        except RuntimeError:
            pass
        print(f"out of memory elsewhere, this process ends too: {message}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(EXIT_CODE)  # an open process group would wait for its peers

    def wait_for_files(self, folder: Path, pattern: str) -> None:
        """Wait, some seconds at most, until every process has written its file."""
        end = time.monotonic() + _FILES
        while not self.alone and len(list(folder.glob(pattern))) < self.size and time.monotonic() < end:
            time.sleep(0.1)
