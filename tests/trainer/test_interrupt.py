"""Ctrl-C and SIGTERM, by real signals to real processes: the step is finished, saved, and said in one line."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import BIN, ROOT, flags, run_forked
from stoppable import build, weights
from transformers import TrainerCallback

from hf_memopt.trainer.interrupt import TrainingInterrupted, _StopAtStepEnd

HERE = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _sigint_is_heard():
    """Shells have what they start in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Struck(TrainerCallback):
    """Sends this process a signal at a moment of one step."""

    def __init__(self, step: int, moment: str = "on_step_begin", number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number
        setattr(self, moment, self.strike)

    def strike(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.number)


def struck(folder, *moments, **fields):
    """A trainer that is interrupted, and what ended it."""
    trainer = build(folder, **fields)
    for moment in moments:
        trainer.add_callback(moment)
    with pytest.raises(TrainingInterrupted) as stopped:
        trainer.train()
    return trainer, stopped.value


def checkpoints(folder) -> list[str]:
    return sorted(path.name for path in Path(folder).glob("checkpoint-*"))


class Process:
    """A process in a session of its own, whose output is read while it runs."""

    def __init__(self, *words) -> None:
        environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{HERE}"}
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [str(word) for word in words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # the tests may ignore it
        )
        self._news = threading.Condition()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def wait_for(self, text: str, times: int = 1) -> list[str]:
        """The lines that hold a text, as soon as there are so many."""

        def there():
            return [line for line in self.lines if text in line]

        with self._news:
            self._news.wait_for(lambda: len(there()) >= times or self._ended, timeout=280)
        assert len(there()) >= times, "".join(self.lines)[-4000:]
        return there()

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(timeout=200)
        with self._news:
            self._news.wait_for(lambda: self._ended, timeout=60)
        return code

    @property
    def output(self) -> str:
        return "".join(self.lines)


def started(folder, step: int, *launcher, **fields) -> Process:
    """stoppable.py, waiting in a step."""
    process = Process(*(launcher or [sys.executable]), HERE / "stoppable.py", folder, step, json.dumps(fields))
    process.wait_for("waiting", 2 if launcher else 1)
    return process


# ---- MemoryTrainer in somebody's own process


@pytest.mark.slow
def test_the_step_is_finished_and_saved(tmp_path):
    """What resumes from there is the uninterrupted run, to the last bit."""
    plain = build(tmp_path / "plain")
    plain.train()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    _, stopped = struck(tmp_path / "run", Struck(2))
    assert isinstance(stopped, KeyboardInterrupt)
    assert (stopped.step, checkpoints(tmp_path / "run")) == (3, ["checkpoint-2", "checkpoint-3"])
    assert stopped.checkpoint == str(tmp_path / "run" / "checkpoint-3")
    assert str(stopped) == f"stopped at step 3; saved as {stopped.checkpoint}"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    resumed = build(tmp_path / "run")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6 and torch.equal(weights(resumed), weights(plain))


@pytest.mark.slow
def test_the_end_of_a_run_is_not_taken_for_a_finished_one(tmp_path):
    """save_total_limit=1 with a best model deletes the last checkpoint when training finishes; epochs end, too."""
    fields = {
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    }
    struck(tmp_path / "best", Struck(2), **fields)
    assert (tmp_path / "best" / "checkpoint-3").is_dir()
    trainer, _ = struck(tmp_path / "epoch", Struck(2), save_strategy="epoch", eval_strategy="epoch")
    assert checkpoints(tmp_path / "epoch") == ["checkpoint-3"]
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry]


@pytest.mark.slow
def test_whoever_saves_nothing_is_told_so(tmp_path):
    _, stopped = struck(tmp_path, Struck(2), save_strategy="no")
    assert not checkpoints(tmp_path) and stopped.checkpoint is None
    assert str(stopped) == "stopped at step 3; nothing was saved, since save_strategy is no"


def test_a_second_one_stops_at_once(tmp_path):
    """In the middle of the step: the newest checkpoint is named."""
    _, stopped = struck(tmp_path, Struck(2), Struck(2, "on_pre_optimizer_step"))
    assert stopped.step == 2 and checkpoints(tmp_path) == ["checkpoint-2"]
    assert str(stopped) == f"stopped at step 2 (at once); saved as {tmp_path / 'checkpoint-2'}"


@pytest.mark.slow
def test_an_evaluation_is_not_waited_for(tmp_path):
    """The step before it is saved, as it would have been after it."""
    plain = build(tmp_path / "plain", eval_strategy="steps", eval_steps=3)
    plain.train()
    trainer, stopped = struck(
        tmp_path / "run",
        Struck(3, "on_prediction_step"),
        eval_strategy="steps",
        eval_steps=3,
        per_device_eval_batch_size=2,
    )
    assert stopped.step == 3 and checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-3"]
    assert not [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    resumed = build(tmp_path / "run", eval_strategy="steps", eval_steps=3)
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(plain))


@pytest.mark.slow
def test_an_error_after_the_signal_is_the_stops(tmp_path):
    """As when the same signal has ended a data loader's worker: the last finished step is saved all the same."""

    class Failing(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    _, stopped = struck(tmp_path, Struck(3), Failing())
    assert "stopped at step 3 (RuntimeError: DataLoader worker" in str(stopped)
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    plain, resumed = build(tmp_path / "plain"), build(tmp_path)
    plain.train()
    resumed.train(resume_from_checkpoint=True)
    assert torch.equal(weights(resumed), weights(plain))


@pytest.mark.slow
def test_handlers_of_the_users_own_stay(tmp_path):
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        trainer = build(tmp_path)
        trainer.add_callback(Struck(2))
        trainer.train()
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT] and trainer.state.global_step == 6


@pytest.mark.slow
def test_training_in_another_thread(tmp_path):
    """Python allows handlers in the main thread alone."""
    trainer = build(tmp_path)
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert trainer.state.global_step == 6


# ---- processes of their own


@pytest.mark.slow
def test_sigterm(tmp_path):
    process = started(tmp_path, 3)
    process.process.send_signal(signal.SIGTERM)
    process.wait_for("stopping at the end of step 3")
    process.process.send_signal(signal.SIGTERM)  # as schedulers do, to a launcher and to its processes
    (tmp_path / "go").touch()
    assert process.end() == 143
    assert process.lines[-1] == f"stopped at step 3; saved as {tmp_path / 'checkpoint-3'}\n"
    assert "Traceback" not in process.output and "came back" not in process.output


@pytest.mark.slow
def test_data_loaders_workers_live_through_it(tmp_path):
    """A terminal's Ctrl-C goes to the whole group of processes."""
    process = started(tmp_path, 3, dataloader_num_workers=2)
    os.killpg(process.process.pid, signal.SIGINT)
    (tmp_path / "go").touch()
    assert process.end() == 130
    assert process.lines[-1] == f"stopped at step 3; saved as {tmp_path / 'checkpoint-3'}\n"
    assert "Traceback" not in process.output


@pytest.mark.engines
@pytest.mark.parametrize("whom", ["the launcher", "one process"])
def test_two_processes_stop_at_the_same_step(whom, tmp_path):
    launcher = [
        "accelerate",
        "launch",
        *flags(config_file=ROOT / "accelerate_configs" / "cpu_x2.yaml", main_process_port=0),
    ]
    process = started(tmp_path, 3, *launcher)
    pid = process.process.pid if whom == "the launcher" else int(process.wait_for("waiting")[1].split()[-1])
    os.kill(pid, signal.SIGINT)
    (tmp_path / "go").touch()
    assert process.end() != 0  # the launcher's own: it reports its processes' codes, or the signal
    (said,) = process.wait_for("stopped at step")
    assert said == f"stopped at step 3; saved as {tmp_path / 'checkpoint-3'}\n"
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    states = {file.name for file in (tmp_path / "checkpoint-3").glob("rng_state*")}
    assert states == {"rng_state_0.pth", "rng_state_1.pth"}
    assert "out of memory" not in process.output
    if whom == "one process":
        assert "exitcode  : 130" in process.output


@pytest.mark.slow
def test_a_recipe_continues_by_the_same_command(tmp_path):
    command = [
        sys.executable,
        ROOT / "recipes" / "pretrain.py",
        *flags(
            preset="cpu",
            max_length=32,
            effective_batch_size=4,
            held_out=8,
            samples=1,
            save_strategy="steps",
            save_steps=500,
            logging_steps=1,
            max_steps=20000,
            eval_strategy="no",
            output_dir=tmp_path / "out",
        ),
    ]
    process = Process(*command)
    process.wait_for("/20000: loss ")
    process.process.send_signal(signal.SIGINT)
    assert process.end() == 130
    (checkpoint,) = checkpoints(tmp_path / "out")
    step, place = checkpoint.rpartition("-")[2], tmp_path / "out" / checkpoint
    assert process.lines[-1] == f"stopped at step {step}; saved as {place}; the same command continues\n"
    assert "Traceback" not in process.output
    again = run_forked(*command, "--max_steps", int(step) + 1)
    assert again.returncode == 0, again.stderr
    assert f"resuming from {place} (step {step} of {int(step) + 1})" in again.stdout + again.stderr


# ---- resuming


def test_resuming_says_from_where_and_takes_the_new_intervals(tmp_path, caplog):
    build(tmp_path, max_steps=2).train()
    caplog.clear()
    trainer = build(tmp_path, save_steps=3, logging_steps=1, logging_strategy="steps")
    with caplog.at_level(logging.WARNING, logger="hf_memopt"):
        trainer.train(resume_from_checkpoint=True)
    said = [record.message for record in caplog.records if record.name == "hf_memopt.trainer.checkpoints.resuming"]
    assert said == [
        f"resuming from {tmp_path / 'checkpoint-2'} (step 2 of 6)",
        "from here on logging_steps=1 (before: 500), save_steps=3 (before: 2)",
    ]
    assert checkpoints(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-6"]
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry] == [3, 4, 5, 6]


def test_what_the_first_signal_says(capfd):
    for number, index, line in (
        (signal.SIGINT, 0, "\nstopping at the end of step 8; Ctrl-C again stops at once\n"),
        (signal.SIGTERM, 0, "\nstopping at the end of step 8\n"),
        (signal.SIGINT, 1, ""),
    ):
        state, args = SimpleNamespace(global_step=7), SimpleNamespace(process_index=index)
        stop = _StopAtStepEnd(SimpleNamespace(state=state, args=args))
        stop.request(number, None)
        assert stop.signal == number and capfd.readouterr().err == line


def test_one_process_alone_stops_within_an_evaluation():
    left = []
    for number, processes, leaves in ((None, 1, False), (signal.SIGINT, 1, True), (signal.SIGINT, 2, False)):
        stop = _StopAtStepEnd(SimpleNamespace())
        stop.signal, stop._saves, stop._leave = number, lambda: False, left.append
        left.clear()
        stop.on_prediction_step(SimpleNamespace(world_size=processes), SimpleNamespace(global_step=3), "control")
        assert left == ["control"] * leaves
