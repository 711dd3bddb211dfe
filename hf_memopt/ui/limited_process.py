"""A question's command in a process of its own, which may take only so much time and memory."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from hf_memopt.errors import InputError
from hf_memopt.redaction import is_secret
from hf_memopt.ui.limits import Limits, check_public
from hf_memopt.ui.question import CONFIG, Question
from hf_memopt.units import size

_POLL_SECONDS = 0.1
_LONGEST_OUTPUT = 8 * 2**20  # bytes


def ask(question: Question, command: str, limits: Limits, *options: str) -> dict[str, Any]:
    """The JSON that a command prints about a question, with the notes beside it among its own.

    Args:
        command: estimate or plan.
        more: options of the command beside the question's, which come from us, not from the form.

    Raises:
        InputError: the question is refused, by check_public() or by the command, or exceeds the limits.
    """
    if limits.public:
        check_public(question)
    # -P: the folder that it starts in is not searched for modules.
    program = [sys.executable, "-P", "-c", "from hf_memopt.cli import main; main()"]
    code, output, error = run_limited([*program, *question.argv(command, *options)], limits, question.config)
    if code not in (0, 1) or not output:  # 1 is an answer: it does not fit
        lines = [line.removeprefix("error: ") for line in error.splitlines() if line.startswith("error: ")]
        raise InputError(lines[-1] if lines else f"{command} ended with exit code {code}; try a smaller model")
    said = [line.removeprefix("note: ") for line in error.splitlines() if line.startswith("note: ")]
    answer = json.loads(output)
    return answer | {"notes": [*said, *answer["notes"]]}


def run_limited(command: list[str], limits: Limits, config: str = "") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command that runs in an empty folder.

    Args:
        config: the content of the folder's only file, job.yaml.

    Raises:
        InputError: it took more time or memory than the limits allow, and was ended.
    """
    # An empty folder: a hub id is never the name of a folder beside it.
    with (
        TemporaryDirectory() as folder,
        open(Path(folder) / ".out", "w+b") as out,
        open(Path(folder) / ".err", "w+b") as err,
    ):
        if config:
            (Path(folder) / CONFIG).write_text(config, encoding="utf-8")
        process = psutil.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=_environment(limits)
        )
        try:
            _watch(process, limits)
        finally:
            _end(process)
        for file in (out, err):
            file.seek(0)
        output, error = (file.read(_LONGEST_OUTPUT).decode(errors="replace") for file in (out, err))
    return process.returncode, output, error


def _environment(limits: Limits) -> dict[str, str]:
    """Strangers' questions get no token: gated and private models of the instance's owner stay closed to them."""
    if not limits.public:
        return dict(os.environ)
    public = {name: value for name, value in os.environ.items() if not is_secret(name)}
    return public | {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}


def _watch(process: psutil.Popen, limits: Limits) -> None:
    """Wait for the end, or for a limit.

    Raises:
        InputError: time or memory exceeds its limit.
    """
    end = time.monotonic() + limits.seconds
    while process.poll() is None:
        if time.monotonic() > end:
            raise InputError(f"more than {limits.seconds:.0f} s: ask for a smaller model, or on a machine of your own")
        total = 0
        for member in _family(process):
            try:
                total += member.memory_info().rss
            except psutil.Error:  # ended meanwhile
                continue
        if total > limits.memory_bytes:
            raise InputError(f"more than {size(limits.memory_bytes)} of memory: ask on a machine of your own")
        time.sleep(_POLL_SECONDS)


def _family(process: psutil.Popen) -> list[psutil.Process]:
    """The process and all that it started."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return [process]


def _end(process: psutil.Popen) -> None:
    for member in reversed(_family(process)):
        try:
            member.kill()
        except psutil.Error:
            continue
    process.wait()
