"""advise: what ran out of memory, when, why, and what to change."""

import io
import json
import sys

import pytest
from conftest import flags
from test_oom import TABLE

from hf_memopt.errors import InputError
from hf_memopt.oom.causes import Failure, explain
from hf_memopt.oom.classify import Diagnosis, OomKind, diagnose, diagnose_text
from hf_memopt.oom.figures import _CONTEXT, _attribute, parse_figures
from hf_memopt.reports.advice import Advice, advise, advise_on_text
from hf_memopt.units import GIB

CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 23.64 GiB "
    "of which 1.12 GiB is free. {others}Including non-PyTorch memory, this process has {own} GiB memory in use. Of "
    "the allocated memory {allocated} GiB is allocated by PyTorch, and {unused} MiB is reserved by PyTorch but "
    "unallocated."
)
PLAIN = CUDA.format(others="", own="22.50", allocated="21.50", unused="300.00")


def log(frames: str, message: str = PLAIN, progress: str = "") -> str:
    where = "".join(f'  File "/x/y.py", line 3, in {frame}\n    something()\n' for frame in frames.split())
    return f"{progress}\nTraceback (most recent call last):\n{where}{message}\n"


_PIECES = [
    ({}, False, False),
    ({"asked_bytes": 2, "unused_bytes": 2, "capacity_bytes": 20}, True, False),
    ({"asked_bytes": 3, "unused_bytes": 2, "free_bytes": 1, "capacity_bytes": 20}, True, False),
    ({"asked_bytes": 4, "unused_bytes": 2, "free_bytes": 1, "capacity_bytes": 20}, False, False),
    ({"asked_bytes": 2, "unused_bytes": 2, "capacity_bytes": 40}, False, False),  # 5 % is usual
    ({"asked_bytes": 9, "others_bytes": 6, "unused_bytes": 2, "free_bytes": 1, "capacity_bytes": 80}, False, True),
    (
        {"asked_bytes": 9, "others_bytes": 6, "unused_bytes": 2, "capacity_bytes": 80},
        False,
        False,
    ),
    ({"asked_bytes": 1, "others_bytes": 4, "capacity_bytes": 80}, False, False),
    ({"asked_bytes": 1, "others_bytes": 1, "capacity_bytes": 10}, False, False),  # a gibibyte is a desktop's
]


def test_memory_in_pieces_and_memory_of_others(subtests):
    """Figures in GiB."""
    for figures, fragmented, squeezed in _PIECES:
        with subtests.test(figures=str(figures), fragmented=str(fragmented), squeezed=str(squeezed)):
            failure = Failure(diagnosis=None, figures={name: size * GIB for name, size in figures.items()})
            assert (failure.fragmented, failure.squeezed) == (fragmented, squeezed)


_SEEDS_CAUSES = [
    (log("<module> from_pretrained"), "load", None, "the weights alone do not fit", "--method qlora"),
    (log("train forward"), "forward", None, "do not fit beside weights", "activation_checkpointing=true"),
    (
        log("train compute_loss forward", progress="  0%|      | 0/500 [00:00<?, ?it/s]"),
        "forward",
        0,
        "do not fit beside weights",
        "activation_checkpointing=true",
    ),
    (log("train step _init_group"), "optimizer", None, "states in its first step", "optim=adamw_8bit"),
    (
        log("train evaluate evaluation_loop prediction_step forward", progress=" 9%|# | 90/999 [1:0"),
        "eval",
        90,
        "evaluation batches",
        "per_device_eval_batch_size=1",
    ),
    (
        log("train _save_checkpoint _save_optimizer_and_scheduler"),
        "save",
        None,
        "saving gathers",
        "fsdp_state_dict_type",
    ),
    (log("train _load_from_checkpoint"), "resume", None, "beside the new ones", "MemoryTrainer"),
    (
        log("train training_step backward", progress=" 12%|█▏   | 120/1000 [10:01<1:20:00,  5.0s/it]"),
        "backward",
        120,
        "it fitted for 120 steps",
        "probe_worst_batch=true",
    ),
    (
        log("train backward", CUDA.format(others="", own="22.50", allocated="16.00", unused="5800.00")),
        "backward",
        None,
        "memory is fragmented",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
    ),
    (
        log(
            "train forward",
            CUDA.format(
                others="Process 7 has 9.00 GiB memory in use. ", own="12.40", allocated="11.00", unused="100.00"
            ),
        ),
        "forward",
        None,
        "other processes hold 9.00 GiB",
        "end them",
    ),
    (
        log("train backward", progress="memory grows: leak: something keeps tensors\n 50%|## | 500/1000 [10:0"),
        "backward",
        500,
        "memory grew: leak",
        "probe_worst_batch",
    ),
]


def test_the_seeds_table_of_causes(subtests):
    for text, stage, step, why, first in _SEEDS_CAUSES:
        with subtests.test(text=str(text), stage=str(stage), step=str(step), why=str(why), first=str(first)):
            found = advise_on_text(text)
            assert (found.what, found.stage, found.step) == ("device", stage, step)
            assert why in found.why and found.changes[0]["change"].startswith(first)
            assert 1 <= len(found.changes) <= 3 and found.figures["asked_bytes"] == int(1.96 * 2**30)


_CAUSES = [
    ("load", None, None, None, "", "the weights alone do not fit", "--method qlora"),
    ("forward", 0, None, None, "", "from the first step on", "activation_checkpointing=true"),
    ("optimizer", 0, None, None, "", "makes its states in its first step", "optim=adamw_8bit"),
    ("backward", 40, None, None, "", "it fitted for 40 steps, so a longer batch", "probe_worst_batch"),
    ("backward", 40, True, None, "", "this batch is larger than all before", "probe_worst_batch"),
    ("forward", 40, False, None, "", "larger batches among them", "probe_worst_batch"),
    ("forward", 40, False, "leak", "", "memory grew: leak", "probe_worst_batch"),
    ("eval", 40, None, None, "", "evaluation batches are larger", "per_device_eval_batch_size=1"),
    (
        "forward",
        40,
        True,
        None,
        CUDA.format(others="", own="22.50", allocated="16.00", unused="5800.00"),
        "memory is fragmented",
        "PYTORCH_ALLOC_CONF",
    ),
]


def test_causes_as_the_trainer_knows_them(subtests):
    """The founding guides' table: step 0, after N steps, evaluation, long sequences, now and then."""
    for stage, step, longest, grown, message, why, first in _CAUSES:
        with subtests.test(
            stage=str(stage),
            step=str(step),
            longest=str(longest),
            grown=str(grown),
            message=str(message),
            why=str(why),
            first=str(first),
        ):
            found = Diagnosis(OomKind.DEVICE, True, "device memory ran out", message)
            cause, changes = explain(
                Failure(
                    diagnosis=found,
                    stage=stage,
                    step=step,
                    figures=parse_figures(message),
                    grown=grown,
                    longest=longest,
                )
            )
            assert why in cause and changes[0].startswith(first)


def test_every_known_message_is_known_in_a_log(subtests):
    """The table that the trainer asks, without the exceptions' types."""
    for error, kind, helps in [row for row in TABLE if diagnose(row[0]).cause]:
        with subtests.test(error=error, kind=kind, helps=helps):
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found = diagnose_text(f"some line before\n{message}\nsome line after")
            assert found.kind == kind and found.smaller_batch_helps is helps and found.cause


def test_what_has_nothing_to_do_with_memory():
    assert advise_on_text("Traceback (most recent call last):\nKeyError: 'labels'") is None
    assert advise_on_text("") is None


def test_a_log_file_and_a_folder_of_logs(tmp_path):
    (tmp_path / "train.log").write_text("all is well\r" + log("train forward"), encoding="utf-8")
    assert advise(str(tmp_path / "train.log")) == advise(str(tmp_path))
    (tmp_path / "train.log").write_bytes(b"\xff\xfe broken \x00" + log("train forward").encode())
    assert advise(str(tmp_path)).stage == "forward"


def test_what_memory_trainer_leaves(tmp_path):
    report = {
        "event": "out_of_memory",
        "step": 7,
        "stage": "backward",
        "kind": "device",
        "message": PLAIN,
        "cause": "device memory ran out",
        "next": [{"change": "loss_chunk_size=512", "saved_bytes": 2**30}],
    }
    event = {
        "event": "oom_recovered",
        "step": 3,
        "stage": "backward",
        "message": PLAIN,
        "micro_batch_before": 8,
        "micro_batch_after": 4,
    }
    grown = {"event": "memory_grows", "step": 40, "label": "fragmentation"}
    lines = [json.dumps({"step": 1, "phase": "train"}), json.dumps(event), '{"torn']
    (tmp_path / "memory_log.jsonl").write_text("\n".join(lines))
    recovered = advise(str(tmp_path))
    assert recovered.step == 3 and recovered.changes[0]["change"].startswith("per_device_train_batch_size=4")
    (tmp_path / "memory_log.jsonl").write_text(json.dumps(grown))
    assert "expandable_segments" in advise(str(tmp_path)).why
    (tmp_path / "oom_report.json").write_text(json.dumps(report))
    ended = advise(str(tmp_path))
    assert ended.changes == report["next"] and ended.step == 7  # the end counts more


def test_a_run_that_went_well(tmp_path):
    (tmp_path / "memory_report.json").write_text("{}")
    assert advise(str(tmp_path)) is None


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda folder: str(folder), "has none of oom_report.json"),
        (lambda folder: str(folder / "nothing.log"), "no such folder or file"),
        (lambda folder: _write(folder / "oom_report.json", "{torn").parent, "not readable as JSON"),
        (lambda folder: _write(folder / "oom_report.json", "[]").parent, "holds a list, not an object"),
    ],
)
def test_bad_input(make, error, tmp_path, command):
    with pytest.raises(InputError, match=error):
        advise(str(make(tmp_path)))
    code, out, err = command("advise", make(tmp_path))
    assert code == 2 and error in err and not out


def _write(file, text):
    file.write_text(text)
    return file


def test_the_command_line(command, tmp_path, monkeypatch):
    (tmp_path / "train.log").write_text(log("train backward", progress=" 5%| | 50/1000 [10:0"))
    code, out, _ = command("advise", tmp_path / "train.log")
    assert code == 0
    for line in ("what: device", "when: backward after 50 steps", "why:", "try 1:", "try 3:", "capacity 23.64 GiB"):
        assert line in out
    monkeypatch.setattr(sys, "stdin", (tmp_path / "train.log").open())
    code, out, _ = command("advise", "-", "--json")
    assert code == 0 and Advice(**json.loads(out)).step == 50
    code, out, _ = command("advise", "a text that is about something else")
    assert code == 1 and "nothing to explain" in out


@pytest.mark.slow
def test_savings_are_predicted_where_the_job_is_told(command, tmp_path):
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, vocab_size=2000
    ).save_pretrained(tmp_path)
    code, out, err = command(
        "advise",
        log("train forward"),
        *flags(model=tmp_path, preset="rtx_3060"),
        "--seq-len",
        1024,
        "--set",
        "activation_checkpointing=false",
        "--json",
    )
    assert code == 0, err
    changes = json.loads(out)["changes"]
    assert all(change["saved_bytes"] > 0 for change in changes)
    assert changes[:3] == sorted(changes[:3], key=lambda change: -change["saved_bytes"])
    # The folder has no weights.
    smaller = [change["change"].removeprefix("a smaller model, trained from scratch: ") for change in changes[3:]]
    assert smaller == [
        "num_hidden_layers=1",
        "hidden_size=32, num_attention_heads=2, intermediate_size=88, num_key_value_heads=2",
    ]
    code, out, err = command(
        "advise", log("train forward"), "--model", tmp_path, "--preset", "rtx_3060", "--set", "max_frames=4"
    )
    assert code == 2 and not out and err.startswith("error: ")  # all that estimate reads is read: it sees no videos


# ---- logs of any size and form


LONG = {
    "communication": "NCCL " * 60_000,
    "workers": "in DataLoader worker process DataLoader worker (pid " * 6_000,
    "pinned memory": "pin_memory pinned memory " * 12_000,
    "names of errors": "memory " + "nccl" * 75_000,
    "digits": "memory " + "1" * 300_000 + "." * 1000,
    "numbers": "Tried to allocate " + "1.1" * 100_000 + " GiB CUDA out of memory",
    "optimizers": "CUDA out of memory " + "optim.py " * 33_000,
    "steps": "CUDA out of memory " + "| " * 150_000 + "1" * 5000 + "/1 [",
    "modules": "memory " + "a." * 150_000 + "MemoryErro",
    "spaces": "memory" + " " * 300_000 + "x",
}


@pytest.mark.slow
@pytest.mark.drawn(3)
@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
@pytest.mark.timeout(60)  # some of them took minutes, when gaps in the patterns had no bound
def test_a_line_of_300_kilobytes(text):
    found = advise_on_text(text)
    assert found is None or (found.what == "device" and len(found.message) <= 500)


def test_what_stands_between_may_be_long():
    line = f"NCCL WARN {'x' * 100_000} out of memory"
    assert diagnose_text(line).kind is OomKind.COMMUNICATION
    assert diagnose_text("out of memory NCCL").kind is OomKind.NOT_MEMORY  # the other way round it is not NCCL's


@pytest.mark.parametrize(
    "message",
    [
        "Tried to allocate . GiB",
        "Tried to allocate 1.2.3 GiB",
        f"Tried to allocate {'9' * 400} GiB",
        "1 GiB free; GiB free",
    ],
)
def test_sizes_that_are_none(message):
    parse_figures(message)
    assert advise_on_text(f"CUDA out of memory. {message}").what == "device"


def test_only_a_logs_end_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("hf_memopt.reports.advice.LARGEST_TEXT", 1000)
    (tmp_path / "a.log").write_text(log("train backward") + "x" * 2000)
    assert advise(str(tmp_path / "a.log")) is None
    (tmp_path / "a.log").write_text("x" * 2000 + "\n" + log("train backward"))
    assert advise(str(tmp_path / "a.log")).stage == "backward"


@pytest.mark.slow
def test_a_pipe_is_read_to_its_end_but_not_without_end(command, monkeypatch):
    for name, size in (("LARGEST_TEXT", 4 * 2**20), ("_LARGEST_PIPE", 8 * 2**20)):
        monkeypatch.setattr(f"hf_memopt.cli.advise.{name}", size)
    content = b"\xff\n" * 3 * 2**20 + log("train backward").encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    code, out, _ = command("advise", "-", "--json")
    assert code == 0 and json.loads(out)["stage"] == "backward"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content * 2)))
    code, out, err = command("advise", "-")
    assert code == 2 and not out and "give the log as a file" in err


def test_colours_and_directions_are_not_printed():
    assert advise_on_text("\x1b[31mCUDA out of memory\x1b[0m \u202e.").message == "CUDA out of memory ."


@pytest.mark.parametrize("source", ["x" * 300_000, "~nobody-of-this-name/train.log", "\ud800 CUDA out of memory"])
def test_texts_that_are_no_paths(source):
    try:
        assert advise(source) is None or "memory" in source
    except InputError as error:
        assert "no such folder or file" in str(error)


@pytest.mark.parametrize(("rest", "others"), [(0, 0), (1, 6 * GIB + 1)])
def test_what_nobody_is_listed_for_is_others_above_a_quarter(rest, others):
    figures = {"capacity_bytes": 24 * GIB, "free_bytes": GIB, "allocated_bytes": 17 * GIB - _CONTEXT - rest}
    assert _attribute(dict(figures), []).get("others_bytes", 0) == others
