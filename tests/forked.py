"""Programs in forks of one process that has imported what they import, which takes each of them seven seconds.

A child is what a shell would start: its own arguments, folder, environment, standard streams and exit code. What is
tested of a start itself (imports, limits of memory, a missing library) takes a process of its own: conftest.run().

python forked.py < requests, each a line of JSON; see run().
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path


def run(*command, cwd, environment: dict, timeout: float, stdin: str = "") -> subprocess.CompletedProcess:
    """Run `hf-memopt ...` or `python script ...`; output is kept as text."""
    argv = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "stdin").write_text(stdin)
        request = {"argv": argv, "cwd": str(cwd), "environment": environment, "timeout": timeout, "folder": folder}
        server = _server()
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        assert answer, f"it ended: {sys.executable} {__file__} </dev/null says why"
        code = int(answer)
        output, errors = (Path(folder, name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(argv, code, output, errors)


@cache
def _server() -> subprocess.Popen:
    """It ends with this process, whose end of the pipe closes then."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    atexit.register(server.stdin.close)
    return server


def _serve() -> None:
    import gc

    import bitsandbytes
    import datasets
    import peft
    import torch
    import transformers
    import trl

    for module, names in (
        (torch, ("_dynamo",)),
        (transformers, ("AutoModelForCausalLM", "LlamaForCausalLM", "PreTrainedTokenizerFast", "Trainer")),
        (trl, ("DPOTrainer", "SFTTrainer")),
        (peft, ("get_peft_model",)),
        (datasets, ("load_dataset",)),
        (bitsandbytes, ("nn",)),
    ):
        for name in names:  # most are imported when they are asked for
            getattr(module, name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(_answer(json.loads(line)), flush=True)


def _answer(request: dict) -> int:
    """A request's exit code; that of a killed process where it takes too long."""
    child = os.fork()
    if child == 0:
        os.setsid()
        _become(request)
    end = time.monotonic() + request["timeout"]
    while time.monotonic() < end:
        if (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.02)
    os.killpg(child, 9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _become(request: dict) -> None:
    """Run the program, and end as Python ends."""
    for number, (name, flags) in enumerate(
        (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_CREAT), ("stderr", os.O_WRONLY | os.O_CREAT))
    ):
        os.dup2(os.open(os.path.join(request["folder"], name), flags), number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    program, *arguments = request["argv"]
    code = 0
    try:
        if program == "hf-memopt":
            from hf_memopt.cli import main

            sys.argv = request["argv"]
            main()
        else:
            sys.argv = arguments
            sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
