"""advise on logs rebuilt from public threads (tests/logs), however they were written down; and on invented figures."""

import json
import random
import re
import tomllib
from pathlib import Path

import pytest

from hf_memopt.oom.figures import parse_figures
from hf_memopt.reports.advice import advise_on_text
from hf_memopt.units import GIB, MIB

LOGS = Path(__file__).parents[1] / "logs"
ROWS = tomllib.loads((LOGS / "logs.toml").read_text(encoding="utf-8"))["log"]


INVENTED = tomllib.loads((LOGS / "invented.toml").read_text(encoding="utf-8"))["log"]


def text_of(row) -> str:
    return (LOGS / f"{row['file']}.txt").read_text(encoding="utf-8")


def check(row, advice):
    if "what" not in row:
        assert advice is None
        return
    assert advice is not None
    assert (advice.what, advice.stage, advice.step) == (row["what"], row.get("stage"), row.get("step"))
    assert row["why"] in advice.why
    assert 1 <= len(advice.changes) <= 3


def test_logs_of_public_threads(subtests):
    for row in ROWS:
        with subtests.test(row=str(row)):
            check(row, advise_on_text(text_of(row)))


def test_logs_in_other_words(subtests):
    for row in INVENTED:
        with subtests.test(row=str(row)):
            advice = advise_on_text(row["text"])
            check({"why": "", **row}, advice)
            assert advice is None or row.get("first", "") in advice.changes[0]["change"]


def test_first_changes_are_those_of_the_threads(monkeypatch):
    """The counts of docs/troubleshooting.md, and that each log is in the table."""
    monkeypatch.syspath_prepend(str(LOGS.parent.parent / "benchmarks"))
    import advised_logs

    assert {f"{row['file']}.txt" for row in ROWS} == {file.name for file in LOGS.glob("*.txt")}
    counts = advised_logs.count()
    assert counts["logs"] >= 60 and counts["kinds"] >= 20
    assert counts["causes"] == counts["logs"]
    assert counts["confirmed"] >= 50


# ---- the same logs as other programs write them down


def _colours(text):
    return re.sub(r"(\w+Error)", "\x1b[1;31m\\1\x1b[0m", text)


def _json_records(text):
    lines = text.splitlines()
    return "\n".join(
        json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-01-02T03:04:05Z"}) for line in lines
    )


def _prefixed(prefix):
    return lambda text: "\n".join(prefix + line for line in text.splitlines())


DISGUISES = {
    "Windows": lambda text: text.replace("\n", "\r\n"),
    "colours": _colours,
    "Docker's JSON": _json_records,
    "one JSON record": lambda text: json.dumps({"severity": "ERROR", "message": text}),
    "escaped": lambda text: "job 7 said:\\n" + text.replace("\n", "\\n") if 'File "' in text else text,
    "time stamps": _prefixed("2026-01-02T03:04:05.678901Z "),
    "Kubernetes": _prefixed("2026-01-02T03:04:05.678901234Z stderr F "),
    "compose": _prefixed("trainer-1  | "),
    "mpirun": _prefixed("[1,3]<stderr>:"),
    "default rank": _prefixed("[default2]:"),
    "stamp and rank": _prefixed("2026-01-02 03:04:05,678 [rank5]: "),
    "a run's start": lambda text: "Map: 100%|██████████| 52002/52002 [00:03<00:00, 15000.11 examples/s]\n" + text,
    "and its end": lambda text: (
        text + "\nwandb: Synced 5 files\nsrun: error: node1: task 0: Exited with exit code 1\n"
    ),
}
_RANKED = ("mpirun", "default rank", "stamp and rank")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("disguise", DISGUISES)
def test_logs_as_others_write_them_down(disguise):
    for row in ROWS:
        text = text_of(row)
        if disguise == "escaped" and ("\\n" in text or "[rank" in text):
            continue  # escaped twice, or not at the beginning of each line
        changed = advise_on_text(DISGUISES[disguise](text))
        plain = advise_on_text(text)
        seen = [one and (one.what, one.stage, one.step, one.why, one.figures) for one in (plain, changed)]
        assert seen[0] == seen[1], row["file"]
        if changed and disguise not in _RANKED:  # ranks that load a model each have a remedy of their own
            assert plain.changes == changed.changes, row["file"]


# ---- figures that a device could have


def _message(rng: random.Random) -> tuple[str, dict]:
    """A message in the format of some torch, and what is true of it: whose memory the device holds."""
    capacity = rng.choice([4, 8, 12, 16, 24, 32, 40, 48, 80, 141]) * 0.988
    context = rng.uniform(0.25, 0.95)
    others = [rng.uniform(0.05, 0.8) * capacity for _ in range(rng.choice([0, 0, 0, 1, 2]))]
    while sum(others) > 0.85 * capacity - context:
        others.pop()
    free = rng.uniform(0, 0.08) * capacity
    own = capacity - free - sum(others)
    if own < context + 0.3:
        return _message(rng)
    unused = rng.uniform(0, 0.3) * (own - context)
    allocated = own - context - unused
    asked = free + rng.uniform(0.01, 0.5) * capacity
    gib = "{:.2f} GiB".format
    small = lambda size: gib(size) if size >= 1 else f"{size * 1024:.2f} MiB"  # noqa: E731
    gpu, pid = rng.randrange(8), rng.randrange(100, 4_000_000)
    begin = f"CUDA out of memory. Tried to allocate {small(asked)}"
    style = rng.choice(["container", "this", "nothing", "old"])
    capacity_word = rng.choice(["capacity", "capacty"])
    if style == "old":
        text = (
            f"{begin} (GPU {gpu}; {gib(capacity)} total capacity; {small(allocated)} already allocated; {small(free)} "
            f"free; {small(allocated + unused)} reserved in total by PyTorch)"
        )
    else:
        listed = [f"Process {pid + at} has {small(size)} memory in use. " for at, size in enumerate(others, 1)]
        mine = {
            "container": f"Process {pid} has {small(own)} memory in use. ",
            "this": f"Including non-PyTorch memory, this process has {small(own)} memory in use. ",
        }
        if style != "nothing":
            listed.insert(rng.randrange(len(listed) + 1), mine[style])
        text = (
            f"{begin}. GPU {gpu} has a total {capacity_word} of {gib(capacity)} of which {small(free)} is free. "
            f"{''.join(listed) if style != 'nothing' else ''}Of the allocated memory {small(allocated)} is allocated "
            f"by PyTorch, and {small(unused)} is reserved by PyTorch but unallocated."
        )
    tensors = allocated + unused
    ambiguous = style == "container" and any(tensors - 0.02 <= size <= own + 0.02 for size in others)
    return text, {"own": own, "others": sum(others), "style": style, "tensors": tensors, "ambiguous": ambiguous}


SAVES = (
    *("save_ckpt", "fsdp_save_ckpt", "_save_checkpoint_sync", "save_model_weights", "dump_checkpoint"),
    "save_ema_model",
)
SAVES += ("export_hf_model", "save_lora_weights", "consolidate_full_state", "get_model_state_dict", "save_optimizer")
NO_SAVES = (
    *("save_on_cpu", "pack_hook", "save_for_backward", "load_checkpoint_state", "resave", "saved_tensors_forward"),
)


def test_saving_has_many_names(subtests):
    """In people's own code; and what only sounds like it is the step that it is."""
    text = (
        "Traceback (most recent call last):\n{}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.02 GiB."
    )
    for name in (*SAVES, *NO_SAVES):
        frames = [("/w/train.py", "main", "main()"), ("/w/own.py", name, "x = gather(model)")]
        lines = "".join(f'  File "{path}", line 7, in {inner}\n    {code}\n' for path, inner, code in frames)
        with subtests.test(name=name):
            assert (advise_on_text(text.format(lines)).stage == "save") == (name in SAVES)


@pytest.mark.slow
def test_memory_is_ones_own_or_others():
    """Others and own fit the device together, are never summed over ranks, and own is never others'."""
    rng = random.Random(7)
    for _ in range(1500):
        ranks = [_message(rng) for _ in range(rng.choice([1, 1, 2, 8]))]
        lines = [f"[rank{at}]: torch.OutOfMemoryError: {text}" for at, (text, _) in enumerate(ranks)]
        advice = advise_on_text("\n".join(lines))
        truth = ranks[-1][1]
        figures, error = advice.figures, 0.04 * GIB
        others, own = figures.get("others_bytes", 0), figures.get("own_bytes", truth["tensors"] * GIB)
        if truth["ambiguous"]:  # another process is between this one's tensors and its whole: they differ by a context
            error = GIB
        assert figures == parse_figures(ranks[-1][0])
        assert others + own + figures["free_bytes"] <= figures["capacity_bytes"] + 0.04 * GIB
        assert others <= truth["others"] * GIB + error, lines
        if truth["style"] in ("container", "this"):
            assert abs(own - truth["own"] * GIB) <= error, lines
            assert abs(others - truth["others"] * GIB) <= error, lines
        elif others:
            assert truth["others"] > 0


def test_what_nvml_does_not_know_is_no_ones():
    """Under WSL it reports 2**64 bytes of each process."""
    text = (
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 24.00 GiB of which 1.00 GiB "
        "is free. Including non-PyTorch memory, this process has 17179869184.00 GiB memory in use. Of the allocated "
        "memory 21.00 GiB is allocated by PyTorch, and 300.00 MiB is reserved by PyTorch but unallocated."
    )
    assert {"own_bytes", "others_bytes"}.isdisjoint(parse_figures(text))


def test_metals_figures_are_one_processs():
    """Both are allocations of this process; GB are 2**30 bytes, which newer versions write GiB."""
    text = "MPS backend out of memory (MPS allocated: 5.50 GB, other allocations: 14.76 GB, max allowed: 20.40 GB)."
    figures = parse_figures(text)
    assert figures == parse_figures(text.replace("GB", "GiB"))
    assert figures["capacity_bytes"] == int(20.40 * GIB) and figures["outside_torch_bytes"] == int(14.76 * GIB)
    assert "others_bytes" not in figures


def test_a_limit_of_ones_own_is_no_other_process():
    text = (
        "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 79.15 GiB of which 38.00 GiB "
        "is free. 40.00 GiB allowed; Of the allocated memory 39.80 GiB is allocated by PyTorch, and 100.00 MiB is "
        "reserved by PyTorch but unallocated."
    )
    figures = parse_figures(text)
    assert figures["limit_bytes"] == 40 * GIB and "others_bytes" not in figures
    assert figures["unused_bytes"] == 100 * MIB


# ---- logs in which memory did not fail

TRACEBACK = 'Traceback (most recent call last):\n  File "/x/train.py", line 3, in <module>\n    main()\n'
STEPS = "  3%|▎         | 30/1000 [01:00<32:00,  1.98s/it]\n"
QUIET = {
    "a value": STEPS + TRACEBACK + "ValueError: Unable to create tensor, you should probably activate padding",
    "an import": TRACEBACK + "ImportError: libgomp.so.1: cannot allocate memory in static TLS block",
    "the network": TRACEBACK
    + "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='huggingface.co', port=443)",
    "the disk": TRACEBACK + "OSError: [Errno 28] No space left on device: '/data/out/checkpoint-500'",
    "Ctrl-C": STEPS + "^C" + TRACEBACK + "KeyboardInterrupt\n/x/run.sh: line 3: 4242 Killed      python train.py",
    "time limit": STEPS
    + "slurmstepd: error: *** JOB 77 ON node1 CANCELLED AT 2026-01-02T03:04:05 DUE TO TIME LIMIT ***\n"
    "srun: error: node1: task 0: Killed",
    "another rank": STEPS
    + TRACEBACK
    + "ValueError: labels\nW0102 torch/distributed/elastic/multiprocessing/api.py:916] Unable to shutdown process 9 "
    "via Signals.SIGTERM, forcefully exiting via Signals.SIGKILL\n[1]:\n  exitcode  : -9 (pid: 9)",
    "root cause": "E0102 api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 7) of binary: python\n"
    "Root Cause (first observed failure):\n  exitcode  : 1 (pid: 7)\nOther Failures:\n  exitcode  : -9 (pid: 8)",
    "a warning of cuDNN": STEPS
    + "/x/conv.py:456: UserWarning: Plan failed with a cudnnException: CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: "
    "cudnnFinalizeDescriptor Failed cudnn_status: CUDNN_STATUS_NOT_SUPPORTED (Triggered internally at Conv.cpp:9.)",
    "a tip": "INFO set PYTORCH_ALLOC_CONF to avoid CUDA out of memory errors\n" + STEPS + "{'train_runtime': 300.1}",
    "a condition": "if you see CUDA out of memory, lower the batch size\n{'train_runtime': 300.1}",
    "code that handles it": TRACEBACK.replace("main()", 'if "CUDA out of memory" in str(e):') + "TypeError: no string",
    "a timeout": "[rank2]:[E102 03:04:05 ProcessGroupNCCL.cpp:616] [Rank 2] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE)\n['python', 'train.py'] exits with return code = -6",
    "a gated model": TRACEBACK + "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
    "gradients": TRACEBACK + "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
    "assert": "Assertion `t >= 0 && t < n_classes` failed.\nRuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED "
    "when calling `cublasCreate(handle)`",
    "a preempted job": STEPS + "Received SIGTERM\n['python', 'train.py'] exits with return code = -9",
}


def test_other_failures_are_no_alarm(subtests):
    for text in QUIET.values():
        with subtests.test(text=text):
            assert advise_on_text(text) is None


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.65 GiB "
    "of which 1.00 GiB is free."
)


def test_an_oom_before_the_clean_up_is_the_cause():
    ends = [
        "['python', 'train.py'] exits with return code = -9",
        "/x/run.sh: line 3: 4242 Killed      python train.py",
        "[1]:\n  exitcode  : -9 (pid: 9)\n  traceback : Signal 9 (SIGKILL) received by PID 9",
        "NCCL WARN Cuda failure 2 'out of memory'",
        "requests.exceptions.ConnectionError: wandb",
        f"{TRACEBACK}ValueError: another rank's",
        STEPS.replace("30/", "31/"),  # another rank ends its step
    ]
    for end in ends:
        advice = advise_on_text(f"{STEPS}{OOM}\n{end}")
        assert (advice.what, advice.step) == ("device", 30), end


def test_an_oom_that_a_run_survived_is_not_what_ended_it():
    later = STEPS.replace("30/1000", "700/1000")
    skipped = f"{STEPS}batch skipped: {OOM}\n{later}"
    killed = advise_on_text(f"{skipped}/x/run.sh: line 3: 4242 Killed      python train.py")
    assert (killed.what, killed.step) == ("host", 700)
    assert advise_on_text(f"{skipped}{TRACEBACK}ValueError: x") is None
    again = advise_on_text(f"{skipped}{OOM}\n{TRACEBACK}ValueError: x")
    assert (again.what, again.step) == ("device", 700)
    nccl = "NCCL WARN Cuda failure 2 'out of memory'"
    assert advise_on_text(f"{skipped}{OOM}\n{nccl}").what == "device"
    for text, step in ((STEPS, 30), (f"{STEPS}{nccl}\n{later}", 700)):
        alone = advise_on_text(f"{text}{nccl}\n{TRACEBACK}ValueError: x")
        assert (alone.what, alone.step) == ("communication", step)
    assert advise_on_text(skipped).what == "device"  # it is what went wrong with memory
