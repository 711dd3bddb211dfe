"""Snapshots: recorded by the profiler on real training here; CUDA's format is written by hand, as no GPU is here."""

import gc
import inspect
import json
import pickle
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from benchmarks.profiled_peak import allocator_peak
from hf_memopt import InputError, MemoryArguments, MemoryTrainer, SnapshotCallback
from hf_memopt.contrib.snapshots.snapshot_analysis import analyze_recording, analyze_snapshot
from hf_memopt.contrib.snapshots.snapshot_recording import Allocation, Recording
from hf_memopt.levers.arguments import step_ranges

VOCABULARY, ROWS, TOKENS = 500, 4, 64
LOGITS = ROWS * TOKENS * VOCABULARY * 4  # bytes


def _model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCABULARY
        )
    )


def _data():
    rows = torch.randint(0, VOCABULARY, (32, TOKENS), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def _arguments(folder, **more):
    return TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=ROWS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        gradient_accumulation_steps=2,
        disable_tqdm=True,
        **more,
    )


class Leaking(Trainer):
    kept: list

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        self.kept.append(outputs.logits.detach())
        return loss


@pytest.fixture(scope="module")
def leaking(tmp_path_factory):
    """Three steps of a trainer that keeps every micro-batch's logits."""
    folder = tmp_path_factory.mktemp("leaking")
    callback = SnapshotCallback("2-4")
    trainer = Leaking(model=_model(), args=_arguments(folder), train_dataset=_data(), callbacks=[callback])
    trainer.kept = []
    gc.collect()
    gc.disable()  # what an earlier test left in cycles would be freed in a step that is recorded
    try:
        trainer.train()
    finally:
        gc.enable()
    assert callback.files == [folder / "memory_snapshot_step_4.json.gz"]
    return trainer, analyze_snapshot(callback.files[0])


@pytest.mark.slow
def test_the_peak_is_attributed(leaking):
    trainer, found = leaking
    weights = sum(weight.numel() * weight.element_size() for weight in trainer.model.parameters())
    assert sum(found.by_kind.values()) == found.peak_bytes
    assert found.by_kind["parameters"] == pytest.approx(weights, abs=1000)
    assert found.by_kind["gradients"] == pytest.approx(weights, abs=1000)
    assert found.by_kind["optimizer_states"] == pytest.approx(2 * weights, rel=0.001)
    assert (found.peak_phase, found.peak_step) == ("backward", "4")
    assert found.by_module["model.layers.*.mlp.gate_proj"] > 0
    assert max(size for _, kinds in found.timeline for size in [sum(kinds.values())]) == found.peak_bytes


@pytest.mark.slow
def test_growth_names_what_stayed(leaking):
    _, found = leaking
    assert [one["step"] for one in found.growth] == ["3", "4"]
    for one in found.growth:
        assert one["grown"] == pytest.approx(2 * LOGITS, rel=0.02)  # two micro-batches a step
        assert one["kept"][0]["size"] == 2 * LOGITS
        assert any("modeling_llama.py" in frame for frame in one["kept"][0]["stack"])
    largest = found.largest[0]
    assert (largest["size"], largest["count"], largest["name"]) == (6 * LOGITS, 6, "lm_head")


def test_the_peak_is_the_allocators(tmp_path):
    """The recording of the first step against the profiler's own sum of one just like it."""

    def train(folder, **more):
        trainer = Trainer(model=_model(), args=_arguments(folder), train_dataset=_data(), **more)
        trainer.args.max_steps = 1
        return trainer

    callback = SnapshotCallback("1")
    train(tmp_path / "recorded", callbacks=[callback]).train()
    made = train(tmp_path / "measured")
    weights = sum(weight.numel() * weight.element_size() for weight in made.model.parameters())
    truth = allocator_peak(made.train) + weights
    assert analyze_snapshot(callback.files[0]).peak_bytes == pytest.approx(truth, rel=0.01)


@pytest.mark.slow
def test_memory_trainer_records_where_it_is_asked_to(tmp_path):
    MemoryTrainer(
        model=_model(),
        args=_arguments(tmp_path),
        train_dataset=_data(),
        memory_args=MemoryArguments(snapshot_steps="1,3"),
    ).train()
    files = sorted(path.name for path in tmp_path.glob("memory_snapshot*"))
    assert files == ["memory_snapshot_step_1.json.gz", "memory_snapshot_step_3.json.gz"]


def test_a_recording_is_summed_up_at_its_peak():
    made = [
        Allocation(0, 100, kind="parameters", name="model.layers.0.weight"),
        Allocation(0, 1000, 1.0, 5.0, module="model.layers.0.mlp", kind="activations"),
        Allocation(0, 2000, 2.0, 4.0, module="model.layers.11.mlp", kind="activations"),
        Allocation(0, 30, 3.0, 9.0, kind="activations"),
        Allocation(0, 40, 3.0, module="model.layers.0", kind="temporaries"),
        Allocation(0, 3129, 5.0, 6.0, kind="temporaries"),
    ]
    marks = [(1.0, "step", "7"), (1.0, "phase", "forward"), (4.0, "phase", "backward"), (8.0, "step", "end")]
    segments = [{"total_size": 80, "blocks": [{"state": "inactive", "size": size} for size in (20, 40)]}]
    found = analyze_recording(Recording(made, marks, segments, [], {}), top=2)
    assert (found.peak_bytes, found.peak_phase, found.peak_step) == (3299, "backward", "7")
    assert [found.by_kind[kind] for kind in ("parameters", "activations", "temporaries")] == [100, 30, 3169]
    assert [(one["size"], one["kind"]) for one in found.largest] == [(3129, "temporaries"), (100, "parameters")]
    assert found.by_module == {"(outside modules)": 30}
    share = {"reserved": 80, "allocated": 20, "unused": 60, "largest_unused": 40, "share": 0.75}
    assert found.fragmentation == share
    found = analyze_recording(Recording(made[:-1], marks, [], [], {}))
    assert (found.peak_bytes, found.peak_phase, found.fragmentation) == (3170, "forward", None)
    assert found.by_module == {"model.layers.*.mlp": 3000, "(outside modules)": 30}


def test_steps_that_cannot_be_read(subtests):
    for steps in ["0", "a", "3-2", "1-", "-1", "1;2"]:
        with subtests.test(steps=str(steps)):
            with pytest.raises(InputError, match="snapshot_steps"):
                MemoryArguments(snapshot_steps=steps)
            assert step_ranges("2, 4-6") == [(2, 2), (4, 6)]


# ---- CUDA's format, by hand: a mock of the allocator's history


def _frames(*files):
    return [{"filename": file, "line": 7, "name": name} for name, file in files]


FORWARD = _frames(("forward", "/x/site-packages/torch/nn/modules/linear.py"), ("forward", "/x/models/modeling_a.py"))
STEP = _frames(("step", "/x/site-packages/torch/optim/adam.py"))
LOADED = _frames(("load", "/x/train.py"))


def cuda_snapshot(**more) -> dict:
    """Weights from before (1000 B), an activation freed in backward, a gradient, a state, and an OOM."""

    def event(action, addr, size, time_us, frames=()):
        return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time_us, "frames": list(frames)}

    trace = [
        event("alloc", 2000, 300, 10, FORWARD),
        event("alloc", 3000, 200, 20),  # autograd's thread has no Python frames
        event("free_requested", 2000, 300, 29),
        event("free_completed", 2000, 300, 30),
        event("alloc", 4000, 400, 40, STEP),
        {"action": "oom", "device_free": 64, "size": 9000, "stream": 0, "time_us": 50, "frames": []},
    ]
    blocks = [
        {"address": 1000, "size": 1000, "requested_size": 1000, "state": "active_allocated", "frames": LOADED},
        {"address": 2000, "size": 1000, "requested_size": 0, "state": "inactive", "frames": []},
        {"address": 3000, "size": 1000, "requested_size": 200, "state": "active_allocated", "frames": []},
        {"address": 4000, "size": 1000, "requested_size": 400, "state": "active_allocated", "frames": STEP},
    ]
    segment = {"device": 0, "address": 1000, "total_size": 4000, "allocated_size": 1600, "blocks": blocks}
    return {"segments": [segment], "device_traces": [trace], **more}


def _pickled(folder, content, name="made.pickle"):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return path


def test_a_cuda_snapshot_that_says_nothing_of_owners(tmp_path):
    found = analyze_snapshot(_pickled(tmp_path, cuda_snapshot()))
    assert found.peak_bytes == 1000 + 200 + 400
    assert found.by_kind["other"] == 1000 and found.by_kind["gradients"] == 200
    assert found.by_kind["optimizer_states"] == 400
    assert found.out_of_memory == [{"asked": 9000, "free": 64}]
    assert found.fragmentation == {
        **{"reserved": 4000, "allocated": 3000, "unused": 1000, "largest_unused": 1000, "share": 0.25},
    }
    assert max(sum(kinds.values()) for _, kinds in found.timeline) == 1600


def test_a_cuda_snapshot_of_ours(tmp_path):
    about = {
        "reason": "step 2",
        "device": "cuda:0",
        "capacity": 8000,
        "marks": [
            *((1, "step", "2"), (2, "phase", "forward"), (15, "phase", "backward"), (35, "phase", "optimizer")),
            (45, "phase", "between"),
        ],
        "owners": [
            [1, 1000, 1000, "parameters", "a.weight"],
            [34, 3000, 200, "gradients", "a.weight"],
            [44, 4000, 400, "optimizer_states", "exp_avg of weight 0"],
        ],
    }
    found = analyze_snapshot(_pickled(tmp_path, cuda_snapshot(hf_memopt=about)))
    assert found.by_kind == {
        **{"parameters": 1000, "gradients": 200, "optimizer_states": 400, "activations": 0, "temporaries": 0},
        "other": 0,
    }
    assert found.peak_phase == "optimizer" and found.about["capacity"] == 8000


class Cuda:
    """torch.cuda.memory's part in a recording, as calls; a stand-in, for no GPU is here."""

    def __init__(self, monkeypatch):
        self.calls, self.observer = [], None
        real = {name: getattr(torch.cuda.memory, name) for name in ("_record_memory_history", "_snapshot")}
        for name, function in real.items():
            monkeypatch.setattr(torch.cuda.memory, name, self._like(name, function))
        monkeypatch.setattr(torch.cuda.memory, "_set_memory_metadata", lambda text: self.calls.append(("say", text)))
        monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", self._attach, raising=False)

    def _attach(self, observer):
        self.observer = observer

    def _like(self, name, function):
        def called(*args, **kwargs):
            inspect.signature(function).bind(*args, **kwargs)  # the real one takes these
            self.calls.append((name, args, kwargs))
            return cuda_snapshot() if name == "_snapshot" else None

        return called


def test_on_cuda_the_allocators_history_is_written(tmp_path, monkeypatch):
    cuda = Cuda(monkeypatch)
    monkeypatch.setattr(
        "hf_memopt.monitor.snapshot_callback.Reader", lambda device: SimpleNamespace(capacity=lambda: 8000)
    )
    callback = SnapshotCallback("2", on_oom=True)
    args = SimpleNamespace(device=torch.device("cuda"), process_index=1, output_dir=str(tmp_path))
    state = SimpleNamespace(global_step=0, is_world_process_zero=True)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters())
    everything = {"model": model, "optimizer": optimizer}
    callback.on_train_begin(args, state, None, **everything)
    for step in range(2):
        callback.on_step_begin(args, state, None, **everything)
        model(input_ids=_data()[0]["input_ids"][None], labels=_data()[0]["labels"][None]).loss.backward()
        if step == 1:
            cuda.observer(0, 64, 64, 0)
        callback.on_pre_optimizer_step(args, state, None, **everything)
        optimizer.step()
        callback.on_optimizer_step(args, state, None, **everything)
        optimizer.zero_grad()
        state.global_step += 1
        callback.on_step_end(args, state, None, **everything)
    callback.on_train_end(args, state, None)
    assert [file.name for file in callback.files] == [
        "memory_snapshot_oom_1_rank_1.pickle",
        "memory_snapshot_step_2_rank_1.pickle",
    ]
    for file in callback.files:
        assert analyze_snapshot(file).peak_bytes == 1600
    about = pickle.loads(callback.files[1].read_bytes())["hf_memopt"]
    assert [text for _, kind, text in about["marks"] if kind == "phase"] == [
        *("forward", "forward", "backward", "optimizer", "between"),
    ]
    kinds = [kind for _, _, _, kind, _ in about["owners"]]
    weights = len(list(model.parameters()))
    assert kinds.count("parameters") == kinds.count("gradients") == weights
    assert kinds.count("optimizer_states") == 2 * 3 * weights  # before and after the step
    said = [call[1] for call in cuda.calls if call[0] == "say"]
    assert "model.layers.0.self_attn.q_proj" in said and said[-1] == ""
    history = [call for call in cuda.calls if call[0] == "_record_memory_history"]
    assert history[0][2]["clear_history"] and history[-1][1] == (None,)


@pytest.mark.slow
def test_the_command_line(leaking, tmp_path, command):
    trainer, found = leaking
    file = next(trainer_file for trainer_file in _files(trainer))
    code, output, _ = command("snapshot", file, "--json", "--top", 3)
    told = json.loads(output)
    assert code == 0 and told["peak_bytes"] == found.peak_bytes and len(told["largest"]) == 3
    for name in ("picture.png", "page.html"):
        code, output, _ = command("snapshot", file, "--plot", tmp_path / name)
        assert code == 0 and "lm_head" in output and (tmp_path / name).stat().st_size > 5000
    assert "<svg" in (tmp_path / "page.html").read_text() and "<script" not in (tmp_path / "page.html").read_text()
    for wrong in (("--plot", tmp_path / "x.gif"), ("--plot", tmp_path / "no" / "x.html"), ("--top", 0)):
        assert command("snapshot", file, *wrong)[0] == 2


def _files(trainer):
    return [
        file
        for callback in trainer.callback_handler.callbacks
        if isinstance(callback, SnapshotCallback)
        for file in callback.files
    ]
