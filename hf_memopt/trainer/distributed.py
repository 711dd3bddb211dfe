"""Messages between the processes of a job: chunk sizes to agree on, and that one of them ran out of memory."""

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

_NO_LIMIT = 2**62  # stands for None in a tensor that all processes reduce to its minimum
_ENDED, _SAVED = "hf_memopt/out_of_memory", "hf_memopt/saved"
_POLL = 0.5  # seconds
_FILES = 20.0  # seconds that the first process waits for the random states of the others
_SAVING = 600.0  # seconds that a process waits for the first one to save
_LINGER = 2.0  # seconds that the first process stays alive: it may host the store that the others read


class Peers:
    """The other processes of this job; does nothing where there are none.

    Attributes:
        wait_on_host: a collective blocks the calling thread (gloo), not the device's stream (NCCL).
    """

    def __init__(self, accelerator) -> None:
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.wait_on_host = True
        self._watched = False
        self._device = accelerator.device
        self._group = None
        if self.alone:
            return
        # Sizes are agreed on through gloo, so that agreeing does not wait for the device.
        if distributed.get_backend() != "gloo":
            self.wait_on_host = False
            self._group = distributed.new_group(backend="gloo", timeout=datetime.timedelta(hours=1))
        # torch 2.13 has no public way to the store of a process group that is already initialized. If the function
        # goes, a TCPStore of our own needs one more free port for every job.
        # A connection of its own: a collective may be blocking the other.
        self._store = distributed.distributed_c10d._get_default_store().clone()

    @property
    def alone(self) -> bool:
        """True if this is the only process."""
        return self.size <= 1 or not distributed.is_initialized()

    def smallest(self, elements: int | None) -> int | None:
        """The smallest limit that any process has; None where none has one."""
        smallest = torch.tensor(_NO_LIMIT if elements is None else elements, dtype=torch.int64)
        distributed.all_reduce(smallest, op=distributed.ReduceOp.MIN, group=self._group)
        return None if int(smallest) == _NO_LIMIT else int(smallest)

    def announce(self, message: str, elements: int | None) -> None:
        """Tell the others that this process ran out of memory, and what limit would have helped.

        Not outside of train(): nobody watches there, and the message would stay in the store for the next train().
        """
        if not self.alone and self._watched:
            self._store.set(_ENDED, json.dumps({"process": self.rank, "message": message, "elements": elements}))

    def read_announcement(self) -> dict | None:
        """`process`, `message` and `elements` of a process that ran out of memory; None where there is none.

        None too where the store is gone: the process that hosted it may have ended for any reason.
        """
        try:
            return json.loads(self._store.get(_ENDED)) if self._store.check([_ENDED]) else None
        except RuntimeError:
            return None

    @contextmanager
    def watching(self, save: Callable[[int | None], object]):
        """A context in which this process ends soon after another announces that it ran out of memory.

        The main thread is then blocked in an all-reduce whose gradients never come, so a second thread saves and ends
        the process. The thread is joined on exit: one that returns from the store after the interpreter's end aborts
        the process.

        Args:
            save: called with the limit that would have helped.
        """
        if self.alone:
            yield
            return
        done = threading.Event()
        self._watched = True
        thread = threading.Thread(target=self._watch, args=(save, done), name="hf_memopt peers", daemon=True)
        thread.start()
        try:
            yield
        except Exception:
            # The all-reduce may have failed only because another process ran out of memory and ended.
            if (announced := self.read_announcement()) and announced["process"] != self.rank:
                self._leave(announced)
            raise
        finally:
            self._watched = False
            done.set()
            thread.join()

    def _watch(self, save, done: threading.Event) -> None:
        while not (announced := self.read_announcement()):
            if done.wait(_POLL):
                return
        if announced["process"] == self.rank:
            return
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # torch's current device is set per thread
        save(announced["elements"])
        self._leave(announced)

    def share_checkpoint(self, checkpoint: str | None) -> str | None:
        """The first process's checkpoint, on every process, for which the others wait.

        Args:
            checkpoint: the one that this process has written its part of.

        Returns:
            `checkpoint` where the first process does not answer, or outside of train().
        """
        if self.alone or not self._watched:
            return checkpoint
        try:
            if self.rank == 0:
                self._store.set(_SAVED, checkpoint or "")
                time.sleep(_LINGER)
                return checkpoint
            self._store.wait([_SAVED], datetime.timedelta(seconds=_SAVING))
            return self._store.get(_SAVED).decode() or None
        except RuntimeError:  # the first process has ended, and the store with it
            return checkpoint

    def _leave(self, announced: dict) -> NoReturn:
        """End this process with the exit code that tells launchers to restart the job."""
        process, message = announced["process"], announced["message"]
        print(f"out of memory in process {process}, this one ends too: {message}", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(EXIT_OUT_OF_MEMORY)  # sys.exit would wait for the open process group, and so for its peers

    def wait_for_files(self, folder: Path, pattern: str) -> None:
        """Wait until every process has written its file, for _FILES seconds at most."""
        end = time.monotonic() + _FILES
        while not self.alone and len(list(folder.glob(pattern))) < self.size and time.monotonic() < end:
            time.sleep(0.1)
