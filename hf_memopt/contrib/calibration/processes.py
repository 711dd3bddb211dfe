"""Each measurement in a process of its own, with a limit of its own: a CUDA context and a peak begin from nothing."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hf_memopt.files import write_whole

TAIL = 1500  # characters of a failed measurement's output that are kept


class Skip(Exception):
    """Something cannot be measured on this machine; the message says what is missing."""


class Processes:
    """Runs functions, each in a new process, forked from one that has imported everything.

    Where CUDA turns out to have been started before the fork, which no card was there to exclude, every later process
    imports for itself; so it does where the system cannot fork safely (Windows, and macOS with Metal).

    Args:
        preload: module that the forking process imports; it must not start CUDA.
    """

    def __init__(self, preload: str) -> None:
        # Asks the driver through NVML whether there is a card: cudaGetDeviceCount would start CUDA.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self.context.set_forkserver_preload([preload])

    def run(self, function: Callable[[], dict], limit: float, env: dict[str, str] | None = None) -> dict:
        """Return what a function returned, with `outcome`: measured; or skipped or failed, with `reason`.

        Args:
            function: can be pickled; what it returns can be written as JSON.
            limit: seconds after which its process is killed.
            env: variables of the process.
        """
        result = self._run(function, limit, env or {})
        started = any(phrase in result.get("reason", "") for phrase in ("forked subprocess", "initialization error"))
        if started and self.context.get_start_method() == "forkserver":
            print("CUDA cannot be used after the fork: every case imports for itself from here on", file=sys.stderr)
            self.context = multiprocessing.get_context("spawn")
            result = self._run(function, limit, env or {})
        return result

    def _run(self, function: Callable[[], dict], limit: float, env: dict[str, str]) -> dict:
        with tempfile.TemporaryDirectory() as folder:
            answer, log = Path(folder, "answer.json"), Path(folder, "log")
            process = self.context.Process(target=_answer, args=(function, env, answer, log))
            try:
                process.start()
                process.join(limit)
                ended = f"took longer than {limit:.0f} s" if process.is_alive() else f"exit code {process.exitcode}"
            finally:  # Ctrl-C does not reach it: it has a session of its own
                end_session(process)
            if answer.is_file():
                return json.loads(answer.read_text(encoding="utf-8"))
            text = log.read_text(errors="replace").strip() if log.is_file() else ""
            return {"outcome": "failed", "reason": f"{ended}: {text[-TAIL:]}"}


def end_session(process: multiprocessing.Process) -> None:
    """End a process and what it started, which would keep the device's memory."""
    if process.pid is None:
        return
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _answer(function: Callable[[], dict], env: dict[str, str], answer: Path, log: Path) -> None:
    """Call the function in the new process, and write what it returns."""
    if hasattr(os, "setsid"):
        os.setsid()
    die_with_parent()
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
    except FileNotFoundError:  # Ctrl-C came while this process began, and its parent has tidied up
        os._exit(1)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= env
    try:
        result = {**function(), "outcome": "measured"}
    except Skip as reason:
        result = {"outcome": "skipped", "reason": str(reason)}
    write_whole(answer, json.dumps(result, default=str))


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is killed, so that none keeps the device (Linux only)."""
    try:
        import ctypes

        pr_set_pdeathsig = 1  # linux/prctl.h
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    except (OSError, AttributeError, TypeError):
        return
    if os.getppid() == 1:
        os._exit(1)
