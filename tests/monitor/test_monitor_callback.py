"""The monitor beside a Trainer: its logs, trackers, console, and micro-batches that follow memory."""

import json
import time
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from conftest import slow
from small_runs import QUIET, Rows, collate, llama, train
from test_monitor import GIB
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_memopt import InputError, MemoryArguments, MemoryCallback, MemoryMonitor, MemoryTrainer
from hf_memopt.monitor import snapshot_callback
from hf_memopt.monitor.readers import Reading, peak_resident

# ---- the callback


class Tracker(TrainerCallback):
    """Stands where a tracker's callback stands, before the user's own."""

    def __init__(self):
        self.got = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.got.append(dict(logs))


LOGGING = {
    "logging_strategy": "steps",
    "logging_steps": 2,
    "max_steps": 4,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 4,
}


def test_memory_is_logged_beside_the_loss(tmp_path):
    tracker = Tracker()
    train(tmp_path, prepare=lambda trainer: trainer.add_callback(tracker), **LOGGING)
    shown = [logs for logs in tracker.got if "loss" in logs]
    assert len(shown) == 2
    assert shown[0]["memory/peak_allocated_gib"] == pytest.approx(peak_resident() / GIB, rel=0.2)
    assert shown[0]["tokens_per_second"] > 0
    lines = [json.loads(line) for line in (tmp_path / "memory_log.jsonl").read_text().splitlines()]
    assert {(line["phase"], line["step"]) for line in lines} == {
        ("train", 2),
        ("train", 4),
        ("eval", 2),
        ("eval", 4),
        ("save", 4),
    }
    assert all(0 < line["allocated"] <= line["peak_allocated"] * 1.1 for line in lines)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert any("memory/peak_allocated_gib" in entry for entry in state["log_history"])


@pytest.mark.parametrize("tracker", [slow("tensorboard"), slow("trackio")])
def test_trackers_get_memory_beside_the_loss(tracker, tmp_path, monkeypatch):
    """Through Trainer's own report_to, where the tracker is installed."""
    pytest.importorskip(tracker)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    sent = _spy(tracker, monkeypatch)

    def prepare(trainer):
        trainer.show_predicted_peak(3 * GIB)

    train(tmp_path, prepare=prepare, **LOGGING | {"report_to": tracker})
    assert {"train/loss", "train/memory/peak_allocated_gib"} <= sent.keys()
    assert sent["train/memory/predicted_peak_allocated_gib"] == 3.0


def _spy(tracker: str, monkeypatch) -> dict[str, float]:
    """What the tracker is asked to keep; it keeps it, too."""
    sent: dict[str, float] = {}
    if tracker == "trackio":
        import trackio

        real = trackio.log
        monkeypatch.setattr(
            trackio, "log", lambda logs, *rest, **named: (sent.update(logs), real(logs, *rest, **named))
        )
        return sent
    from torch.utils.tensorboard import SummaryWriter

    scalar = SummaryWriter.add_scalar

    def add_scalar(writer, name, value, *rest, **named):
        sent[name] = value
        return scalar(writer, name, value, *rest, **named)

    monkeypatch.setattr(SummaryWriter, "add_scalar", add_scalar)
    return sent


def test_the_console_stays_readable(tmp_path, capsys):
    train(tmp_path, max_steps=2, logging_strategy="steps", logging_steps=1)
    shown = capsys.readouterr().out
    assert "'loss'" in shown and "memory/" not in shown


def test_any_trainer_can_have_it(tmp_path):
    tracker = Tracker()

    def prepare(trainer):
        trainer.add_callback(tracker)
        MemoryCallback(predicted_peak_bytes=3 * GIB).attach(trainer)

    train(tmp_path, kind=Trainer, prepare=prepare, **LOGGING)
    shown = [logs for logs in tracker.got if "loss" in logs]
    assert all("memory/allocated_gib" in logs for logs in shown)
    assert [logs["memory/predicted_peak_allocated_gib"] for logs in shown] == [3.0, 3.0]


def _watched(capacity: float, **arguments):
    """A MemoryTrainer that believes its tensors fill shares of a device; the real counters of a CPU do not move so."""

    def prepare(trainer):
        trainer.memory_args = MemoryArguments(**arguments)
        trainer.limit._patience = trainer.memory_args.adjustment_frequency
        largest = [0]

        def allocated():
            if trainer._runner.stage == "forward" and trainer._runner.running[0] is not None:
                micro, rows = trainer._runner.running
                largest[0] = micro.elements * rows // micro.samples
                return int((0.3 + largest[0] / 350) * capacity)
            return int(0.3 * capacity)

        trainer._pressure.reader.allocated = allocated
        trainer._callback.monitor = MemoryMonitor(device="cpu", limit=int(capacity))

    return prepare


@pytest.mark.slow
def test_micro_batches_shrink_before_memory_runs_out_and_grow_back(tmp_path, capsys):
    """Batches of up to 4 × 29 × 3 elements take up to 99 % on top of the 30 % that rest there."""
    fields = {"max_steps": 30, "learning_rate": 0.0, "logging_strategy": "steps", "logging_steps": 1}
    found = train(tmp_path, prepare=_watched(16 * GIB, adjustment_frequency=2), **fields)
    kinds = [event["event"] for event in found.events]
    assert "micro_batch_lowered" in kinds and "oom_recovered" not in kinds
    first = next(event for event in found.events if event["event"] == "micro_batch_lowered")
    assert (first["micro_batch_before"], first["micro_batch_after"]) == (4, 2)
    assert first["status"] in ("critical", "emergency")
    dashboard = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[Step ")]
    (reduced,) = [line for line in dashboard if line.startswith(f"[Step {first['step'] + 1}]")]
    assert reduced.endswith(f"Status: {first['status']} - batch reduced to 2 samples at once")
    # No oscillation: each failure doubles the wait for the next growth.
    assert kinds.count("micro_batch_lowered") <= 5


@pytest.mark.slow
def test_lowering_keeps_the_result(tmp_path):
    wanted = train(tmp_path / "plain", kind=Trainer, max_steps=6)
    found = train(tmp_path / "watched", prepare=_watched(16 * GIB), max_steps=6)
    assert found.events and torch.allclose(found.weights, wanted.weights, rtol=0, atol=1e-9)


def test_dynamic_batches_keep_the_effective_batch(tmp_path, capsys):
    fields = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_steps": 6,
        **QUIET,
        "logging_strategy": "steps",
        "logging_steps": 1,
    }

    def trainer(largest):
        args = TrainingArguments(str(tmp_path), remove_unused_columns=False, **fields)
        return MemoryTrainer(
            model=llama(),
            args=args,
            train_dataset=Rows(),
            data_collator=collate,
            memory_args=MemoryArguments(max_batch_size=largest, adjustment_frequency=2),
        )

    grown = trainer(8)
    assert (grown.args.per_device_train_batch_size, grown.args.gradient_accumulation_steps) == (8, 1)
    grown.train()
    sizes = [event for event in grown.memory_events if event["event"] == "micro_batch_restored"]
    assert sizes, "memory was free, so micro-batches grew"
    first, at_once = sizes[0]["step"], sizes[0]["samples_at_once"]
    assert 2 < at_once <= 8 and "piece_elements" in sizes[0]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(f"[Step {first + 1}]")]
    assert line.endswith(f"Status: normal - batch restored to {at_once} samples at once")
    assert grown._runner.window.started[0].size == 8
    with pytest.raises(InputError, match="max_batch_size=3 does not divide the 8 samples"):
        trainer(3)


def test_figures_for_trackers():
    """GiB and shares to four digits; a speed where tokens came since the last figures."""
    callback = MemoryCallback(predicted_peak_bytes=3 * GIB + 1)
    callback.monitor = SimpleNamespace(reader=SimpleNamespace(busy=lambda: 1 / 3))
    callback.data_wait = SimpleNamespace(share=lambda: 0.12345)
    callback._disk_wait = SimpleNamespace(share=lambda: None)
    callback._last_tokens = (0.0, 5)
    sizes = [int(size * GIB) for size in (1 / 3, 0.5, 2 / 3, 0.75, 0.9, 4.0)]
    reading = Reading(*sizes, retries=7, host_resident=GIB // 7, host_available=0)
    args, state = SimpleNamespace(world_size=1), SimpleNamespace(num_input_tokens_seen=5)
    assert callback._figures(args, state, reading) == {
        "memory/peak_allocated_gib": 0.6667,
        "memory/peak_reserved_gib": 0.75,
        "memory/allocated_gib": 0.3333,
        "memory/peak_share_of_capacity": 0.1667,
        "memory/free_on_device_gib": 3.1,
        "memory/host_resident_gib": 0.1429,
        "memory/allocator_retries": 7,
        "data_wait_share": 0.1234,
        "memory/predicted_peak_allocated_gib": 3.0,
        "device_busy_share": 0.3333,
    }
    callback._last_tokens, callback.tokens = (time.perf_counter() - 2, 5), 205
    assert callback._figures(args, state, reading)["tokens_per_second"] == pytest.approx(100, rel=0.1)
    assert callback._last_tokens[1] == 205


def test_the_peak_of_a_step_counts_where_it_is_newer_than_training():
    callback = MemoryCallback()
    callback._peak_before = 800
    for allocated, peak, near, seen in (
        (100, 800, 0, 100),
        (100, 900, 0, 900),
        (100, 900, 500, 500),
        (600, 900, 500, 600),
    ):
        callback.near_peak = near
        reading = Reading(allocated, 0, peak, 0, 0, 1, 0, 0, 0)
        assert callback._at_peak(reading).allocated == seen


class Recording:
    """Stands for a profiler, and notes what is asked of it."""

    def __init__(self, model) -> None:
        self.asked = self.every

    def begin(self):
        self.asked.append("begin")

    def end(self):
        self.asked.append("end")

    def label(self, text):
        pass

    def write(self, path, metadata):
        self.asked.append((path.name, deepcopy(metadata)))
        return path


def test_which_steps_are_recorded(tmp_path, monkeypatch):
    """Steps 2 and 4 to 5 of six, by the first process; each file with the marks and the owners of its steps."""
    monkeypatch.setattr(snapshot_callback, "_ProfilerRecorder", Recording)
    for rank, first in ((0, True), (3, True), (0, False)):
        Recording.every = asked = []
        model, args = torch.nn.Linear(3, 2), SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path))
        args.process_index, state = rank, SimpleNamespace(global_step=0, is_world_process_zero=first)
        callback = snapshot_callback.SnapshotCallback("2,4-5")
        optimizer = SimpleNamespace(state={0: {"exp_avg": torch.zeros(6), "step": 3}})
        callback.on_train_begin(args, state, None, model=model)
        for step in range(6):
            callback.on_step_begin(args, state, None, optimizer=optimizer)
            model(torch.ones(1, 3)).sum().backward()
            callback.on_pre_optimizer_step(args, state, None, model=model)
            callback.on_optimizer_step(args, state, None, optimizer=optimizer)
            state.global_step = step + 1
            callback.on_step_end(args, state, None)
        written = [one for one in asked if isinstance(one, tuple)]
        assert [one for one in asked if isinstance(one, str)] == ["begin", "end"] * 2 * first
        suffix = f"_rank_{rank}" if rank else ""
        names = [f"memory_snapshot_step_{step}{suffix}" for step in (2, 5)] * first
        assert [name for name, _ in written] == [file.name for file in callback.files] == names
        for (_, metadata), steps in zip(written, (["2"], ["4", "5"]) * first, strict=True):
            marks = [text for _, _, text in metadata["marks"]]
            phases = ["forward", "forward", "backward", "optimizer", "between"]
            assert marks == [text for step in steps for text in (step, *phases)] + ["end"]
            assert [kind for _, kind, _ in metadata["marks"]].count("step") == len(steps) + 1
            owners = {(kind, name): size for _, _, size, kind, name in metadata["owners"]}
            assert owners == {
                **{("parameters", "weight"): 24, ("parameters", "bias"): 8, ("gradients", "weight"): 24},
                **{("gradients", "bias"): 8, ("optimizer_states", "exp_avg of weight 0"): 24},
            }
            assert len(metadata["owners"]) == 3 + 3 * len(steps)
            assert (metadata["version"], metadata["device"], metadata["reason"]) == (1, "cpu", f"step {steps[-1]}")
            assert all(abs(time.time() - moment / 1e6) < 60 for moment, *_ in metadata["marks"] + metadata["owners"])


def test_no_more_than_three_failures_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_callback, "_ProfilerRecorder", Recording)
    Recording.every = asked = []
    args = SimpleNamespace(device=torch.device("cpu"), output_dir=str(tmp_path / "new"), process_index=0)
    state = SimpleNamespace(global_step=1, is_world_process_zero=True)
    callback = snapshot_callback.SnapshotCallback("2")
    callback.on_train_begin(args, state, None, model=torch.nn.Linear(3, 2))
    callback.out_of_memory()  # nothing is recorded yet
    assert not asked
    for _ in range(4):
        callback.on_step_begin(args, state, None)
        callback.out_of_memory()
    written = [one for one in asked if isinstance(one, tuple)]
    assert [name for name, _ in written] == [f"memory_snapshot_oom_{number}" for number in (1, 2, 3)]
    assert {metadata["reason"] for _, metadata in written} == {"out of memory in step 2"}
    assert callback._recorder is None and not callback._hooks
