"""Runs that fit and are slow: how long they wait for data is measured, and the advice says what to change."""

import json
from types import SimpleNamespace

import psutil
import pytest
from runs import RECOVERED, reading, report, write_run
from small_runs import QUIET, Rows, collate, llama
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_memopt import MemoryCallback, MemoryTrainer
from hf_memopt.cli.advise import run_advise
from hf_memopt.job.spec import JobSpec
from hf_memopt.monitor.readers import Reader
from hf_memopt.monitor.waiting import DataWait, DiskWait
from hf_memopt.reports.advice import advise
from hf_memopt.reports.next_steps import suggest_next_steps
from hf_memopt.reports.run import read_run
from hf_memopt.reports.run_report import run_page


class Clock:
    """Seconds that pass only where a test lets them."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class SlowRows(Rows):
    """Each sample takes its time, evaluation's take much more."""

    def __init__(self, clock: Clock, seconds: float, first: int = 0):
        super().__init__(first=first)
        self.clock, self.seconds = clock, seconds

    def __getitem__(self, index):
        self.clock.now += self.seconds
        return super().__getitem__(index)


def logged(folder, kind, seconds: float) -> list[dict]:
    """The log of a training whose samples take so many seconds, and whose micro-batches of four compute for 2."""
    clock = Clock()

    class Slow(TrainerCallback):
        """A tracker that takes its time is not the data's fault."""

        def on_log(self, *args, **kwargs):
            clock.now += 1000

    fields = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 12,
        **QUIET,
        "logging_strategy": "steps",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    callback = MemoryCallback()
    callback.data_wait = DataWait(clock)
    # A plain Trainer's callback cannot tell what comes behind it from waiting for data.
    callbacks = [Slow(), callback] if kind is Trainer else [callback, Slow()]
    args = TrainingArguments(str(folder), remove_unused_columns=False, **fields)
    model = llama()
    model.register_forward_pre_hook(lambda *args: setattr(clock, "now", clock.now + 2))
    trainer = kind(
        model=model,
        args=args,
        train_dataset=SlowRows(clock, seconds),
        data_collator=collate,
        eval_dataset=SlowRows(clock, 500, 1000),
        callbacks=callbacks,
    )
    trainer.train()
    lines = [json.loads(line) for line in (folder / "memory_log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["phase"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Trainer, MemoryTrainer])
def test_the_share_of_a_step_that_waits_for_data_is_logged(tmp_path, kind):
    """Of each step 2 × 4 samples × 0.25 s are waited for, 2 × 2 s computed; logging and evaluation do not count."""
    slow = logged(tmp_path / "slow", kind, seconds=0.25)
    quick = logged(tmp_path / "quick", kind, seconds=0.0)
    assert len(slow) == 6 and {line["data_wait_share"] for line in quick} == {0.0}
    # accelerate's data loader fetches a batch ahead: an epoch's first step waits for one more, its last for one less.
    expected = [5 / 13, 4 / 12, 4 / 12, 4 / 12, 3 / 11, 5 / 13]
    assert [line["data_wait_share"] for line in slow] == pytest.approx(expected, abs=1e-4)
    assert slow[0]["dataloader_num_workers"] == 0


def test_fetching_is_told_from_what_else_lies_between_two_steps():
    clock = Clock()
    wait = DataWait(clock)

    def step(timed: bool):
        wait.reset()
        batches = iter([1])
        if timed:
            batches = wait.timed(slowly(batches))
        clock.now += 3  # counting the window's tokens over processes, say
        assert list(batches) == [1]
        wait.step_begins()
        clock.now += 5
        wait.step_ends()

    def slowly(batches):
        for batch in batches:
            clock.now += 2
            yield batch

    step(timed=True)
    assert wait.share() == pytest.approx(2 / 7) and wait.share() is None
    assert wait.share_of_run() is None, "the first step waits for workers to start"
    step(timed=False)
    assert wait.share() == wait.share_of_run() == pytest.approx(3 / 8)
    assert wait.steps_of_run() == (1, 5)


def test_a_step_of_which_no_batch_arrived_does_not_count():
    """Of a Trainer whose callback came late, or whose step ended twice."""
    wait = DataWait(clock := Clock())
    wait.step_begins()
    clock.now += 5
    wait.step_ends()  # it never began to wait
    clock.now += 2
    wait.step_ends()  # nothing arrived since
    assert wait.share() is None and wait.steps_of_run() == (0, 0)
    wait.step_begins()
    clock.now += 2
    wait.step_ends()
    assert wait.share() == 0


def test_the_disks_share_of_the_processors_time(monkeypatch):
    """Linux' counters, made up: a system without iowait has none."""
    before = {"user": 10.0, "idle": 10.0, "iowait": 1.0, "guest": 5.0}
    after = before | {"user": 14.0, "idle": 13.0, "guest": 9.0}
    for waited, share in ((4.0, 0.3), (1.5, 0.5 / 7.5), (1.0, 0.0), (0.0, 0.0)):  # it may fall: proc(5)
        times = [SimpleNamespace(_fields=tuple(one), **one) for one in (before, after | {"iowait": waited})]
        monkeypatch.setattr(psutil, "cpu_times", lambda times=times: times.pop(0))
        assert DiskWait().share() == pytest.approx(share)
    plain = SimpleNamespace(_fields=("user", "idle"), user=1.0, idle=2.0)
    monkeypatch.setattr(psutil, "cpu_times", lambda: plain)
    assert DiskWait().share() is None


def test_how_busy_a_device_is():
    """No card is here: the driver's answer is made up, and its refusal on a MIG slice."""
    reader = Reader("cpu")
    assert reader.busy() is None
    reader.kind, reader._module = "cuda", SimpleNamespace(utilization=lambda device: 37)
    assert reader.busy() == 0.37
    reader._module = SimpleNamespace()
    assert reader.busy() is None


def waiting(**shares) -> list[dict]:
    """A log whose first reading has the start in it."""
    return [reading(step) | ({"data_wait_share": 1.0} if step == 0 else shares) for step in range(0, 60, 10)]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    ("shares", "settings", "cause", "first"),
    [
        ({"data_wait_share": 0.43, "dataloader_num_workers": 0}, {}, "waits for its data", "dataloader_num_workers=4"),
        ({"data_wait_share": 0.43, "dataloader_num_workers": 4}, {}, "waits for its data", "dataloader_num_workers=8"),
        (
            {"data_wait_share": 0.43, "dataloader_num_workers": 4, "processors": 6},
            {},
            "waits for its data",
            "dataloader_num_workers=6",
        ),
        (
            {"data_wait_share": 0.43, "dataloader_num_workers": 2, "processors": 2},
            {"dataloader_prefetch_factor": {"a": 1}},
            "waits for its data",
            "dataloader_prefetch_factor=4",
        ),
        (
            {"data_wait_share": 0.43},
            {"dataloader_num_workers": "many"},
            "waits for its data",
            "dataloader_num_workers=4",
        ),
        (
            {"data_wait_share": 0.43, "dataloader_num_workers": 4, "disk_wait_share": 0.3},
            {},
            "waits for the disk",
            "copy the data to a local disk",
        ),
        (
            {"data_wait_share": 0.01, "device_busy_share": 0.4},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 32},
            "leaves its device idle",
            "per_device_train_batch_size=4 with gradient_accumulation_steps=16",
        ),
    ],
)
def test_what_to_do_about_a_slow_run(shares, settings, cause, first, tmp_path, capsys):
    half = {"peak_allocated_bytes": 11 * 2**30, "peak_reserved_bytes": 12 * 2**30}
    folder = write_run(tmp_path, report(events=[], settings=settings, measured=half), waiting(**shares))
    found = advise(str(folder))
    assert found.what == "slow" and cause in found.cause and found.changes[0]["change"].startswith(first)
    share = shares.get("device_busy_share", shares["data_wait_share"])
    assert f"{share:.0%} of" in found.why and found.why[1:] in suggest_next_steps(read_run(folder))[0]
    assert f"{share:.0%} of" in run_page(read_run(folder))
    assert run_advise(str(folder), JobSpec(model="a/model"), False) == 0
    told = capsys.readouterr().out
    assert f"try 1: {first}" in told and "predicted" not in told


def test_a_run_that_is_not_slow_has_no_advice(tmp_path, capsys):
    folder = write_run(tmp_path, report(events=[]), waiting(data_wait_share=0.02, device_busy_share=0.97))
    assert advise(str(folder)) is None
    assert run_advise(str(folder), None, False) == 1
    assert "waits" in capsys.readouterr().out


def test_one_reading_has_the_start_in_it_and_says_nothing(tmp_path):
    folder = write_run(tmp_path, report(events=[]), [reading(1) | {"data_wait_share": 0.9}])
    assert advise(str(folder)) is None


def test_memory_that_ran_out_comes_first(tmp_path):
    folder = write_run(tmp_path, report(), [*waiting(data_wait_share=0.9), RECOVERED])
    assert advise(str(folder)).what == "device"
