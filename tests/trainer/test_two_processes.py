"""Real pairs of processes, one of which runs out of memory: both go on in smaller pieces, or both end, and soon."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import flags

pytestmark = pytest.mark.engines
HERE = Path(__file__).parents[1]
PLAIN = {"name": "plain", "rank": 0, "phase": None, "step": 0, "micro": 0}
# Some that are recovered: in forward anywhere, in backward before gradients are reduced. Sweeps have every stage
# of both processes (TABLE below).
RECOVERED = [
    {"name": f"{phase}-{rank}-{step}-{micro}", "rank": rank, "phase": phase, "step": step, "micro": micro}
    for phase, rank, step, micro in [
        ("forward", 0, 0, 0),
        ("forward", 0, 2, 1),
        ("forward", 1, 4, 1),
        ("backward", 1, 0, 0),
        ("backward", 1, 3, 0),
    ]
]
# Some that cannot be: the last backward of a window, while gradients are being reduced.
ENDED = [
    {"name": f"end-{rank}-{step}", "rank": rank, "phase": "backward", "step": step, "micro": 1}
    for rank, step in ((0, 0), (1, 2), (0, 4))
]
RESUMED = {**PLAIN, "name": "resumed", "resumed": "end-1-2"}


HOOKS = [
    {**PLAIN, "name": f"hook-{rank}-{micro}-{declared}", "rank": rank, "phase": "pre-hook", "step": 2}
    | {"micro": micro, **({"loss_reduction": "token_mean"} if declared else {})}
    for rank, micro, declared in [(0, 0, True), (1, 1, True), (0, 0, False), (1, 1, False)]
]
COMPRESSED = {**RECOVERED[1], "name": "compressed", "memory": {"activation_compression": "int8"}}
STREAMED = {**RECOVERED[1], "name": "streamed", "frozen": True, "memory": {"weight_streaming": True}}
OTHER = [{**PLAIN, "name": f"other-{rank}", "rank": rank, "phase": "KeyError", "step": 2} for rank in range(2)]
# A stand-in for NCCL, whose streams wait for a process that is gone.
WAITING = {**ENDED[1], "name": "nccl", "stream_waits": True, "fields": {"save_strategy": "steps", "save_steps": 2}}
MACHINES = {**PLAIN, "name": "own", "machines": True, "fields": {"save_strategy": "steps", "save_steps": 2}}
TRL = {
    name: [
        {**PLAIN, "name": f"{name}-trl", "trl": name, "memory": False},
        {**PLAIN, "name": f"{name}-whole", "trl": name},
        {**RECOVERED[1], "name": f"{name}-forward", "trl": name},
        {**RECOVERED[4], "name": f"{name}-backward", "trl": name},
    ]
    for name in ("SFT", "DPO", "Reward")
}
# Test -> the cases that it asks for.
CASES = {
    "test_both_go_on": RECOVERED,
    "test_a_hook_of_ones_own_that_runs_out": HOOKS,
    "test_compressed_activations_give_nearly_the_same_gradients": [
        {**PLAIN, "name": "whole", "memory": {"silent_mode": True}},
        COMPRESSED,
    ],
    "test_streamed_weights_train_the_same": [
        {**PLAIN, "name": "resident", "frozen": True, "memory": {"silent_mode": True}},
        STREAMED,
    ],
    "test_both_end_soon_and_go_on_from_there": [*ENDED, RESUMED],
    "test_another_error_is_not_called_out_of_memory": OTHER,
    "test_a_stream_that_waits_is_not_asked_for_weights": [WAITING],
    "test_machines_without_a_shared_disk_keep_their_parts": [MACHINES],
    "test_one_process_goes_on_where_two_left_off": [ENDED[1]],
}


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> Path:
    """What the cases of the selected tests left, each two processes, forked from one that has imported everything."""
    cases = {}
    for item in request.session.items:
        if item.path == request.path and "folder" in item.fixturenames:
            asked = item.callspec.params["cases"] if hasattr(item, "callspec") else CASES[item.originalname]
            cases |= {case["name"]: case for case in asked}
    folder = tmp_path_factory.mktemp("pairs")
    run(folder, PLAIN, *cases.values())
    return folder


def run(folder, *cases) -> None:
    lines = "\n".join(map(json.dumps, cases))
    subprocess.run(
        [sys.executable, HERE / "two_processes.py", folder],
        input=lines,
        text=True,
        check=True,
        cwd=HERE,
        capture_output=True,
        timeout=3000,
    )


def outcome_of(folder, case) -> dict:
    return json.loads((folder / f"{case['name']}.json").read_text())


def weights(folder, name: str) -> torch.Tensor:
    return torch.load(folder / f"{name}.pt", weights_only=True)


def test_both_go_on(folder):
    for case in RECOVERED:
        assert outcome_of(folder, case)["codes"] == [0, 0], case
        events = [json.loads((folder / f"{case['name']}-{rank}.events").read_text()) for rank in range(2)]
        assert events[case["rank"]] == [1] and events[1 - case["rank"]] == [], case
        assert torch.allclose(weights(folder, case["name"]), weights(folder, "plain"), rtol=0, atol=1e-9), case


# Pairs of answers, as DPO's, are what reward models are trained on.
@pytest.mark.parametrize(
    "cases",
    [pytest.param(cases, marks=[pytest.mark.sweep] * (name == "Reward"), id=name) for name, cases in TRL.items()],
)
def test_trls_trainers_go_on_and_log_what_they_did(folder, cases):
    """They gather metrics in every forward pass, of which a process that runs out of memory has more."""
    plain, whole, *failed = cases
    wanted = [entry for entry in json.loads((folder / f"{plain['name']}.logs").read_text()) if "loss" in entry]
    for case in (whole, *failed):
        assert outcome_of(folder, case)["codes"] == [0, 0], case
        events = [json.loads((folder / f"{case['name']}-{rank}.events").read_text()) for rank in range(2)]
        assert [bool(found) for found in events] == [case in failed and case["rank"] == rank for rank in range(2)]
        assert torch.allclose(weights(folder, case["name"]), weights(folder, plain["name"]), rtol=0, atol=1e-7), case
        logged = [entry for entry in json.loads((folder / f"{case['name']}.logs").read_text()) if "loss" in entry]
        assert [entry["num_tokens"] for entry in logged] == [entry["num_tokens"] for entry in wanted]
        for entry, usual in zip(logged, wanted, strict=True):
            assert usual.keys() <= entry.keys()
            # Each process's mean counts as much, whatever its samples' lengths.
            assert entry["entropy"] == pytest.approx(usual["entropy"], rel=0.05) if "entropy" in usual else True


def test_a_hook_of_ones_own_that_runs_out(folder):
    """DDP has begun its forward then, and broadcast buffers: both end, or the one that failed does not do so again."""
    for case in HOOKS:
        recovered = "loss_reduction" in case
        assert outcome_of(folder, case)["codes"] == ([0, 0] if recovered else [75, 75]), case
        if recovered:
            assert torch.allclose(weights(folder, case["name"]), weights(folder, "plain"), rtol=0, atol=1e-9), case


def test_compressed_activations_give_nearly_the_same_gradients(folder):
    """Reduced over processes, with accumulation, and with a micro-batch that had to be cut."""
    from small_runs import llama

    start = torch.cat([weight.detach().flatten() for weight in llama(torch.float32).parameters()])
    wanted, found = (weights(folder, name) - start for name in ("whole", "compressed"))
    assert not torch.equal(wanted, found)
    assert torch.nn.functional.cosine_similarity(wanted, found, dim=0) > 0.999


def test_streamed_weights_train_the_same(folder):
    """DDP leaves alone what is empty on the device; a micro-batch that had to be cut changes nothing, either."""
    assert outcome_of(folder, STREAMED)["codes"] == [0, 0]
    assert torch.allclose(weights(folder, "streamed"), weights(folder, "resident"), rtol=0, atol=1e-7)


def test_both_end_soon_and_go_on_from_there(folder):
    for case in ENDED:
        found = outcome_of(folder, case)
        assert found["codes"] == [75, 75], case
        checkpoint = folder / case["name"] / f"checkpoint-{case['step']}"
        assert checkpoint.is_dir() == (case["step"] > 0)
        if case["step"]:
            state = json.loads((checkpoint / "memory_state.json").read_text())
            assert state["piece_elements"], "what goes on from here begins with smaller pieces"
            assert {file.name for file in checkpoint.glob("rng_state*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert outcome_of(folder, RESUMED)["codes"] == [0, 0]
    assert torch.allclose(weights(folder, "resumed"), weights(folder, "plain"), rtol=0, atol=1e-9)


def test_another_error_is_not_called_out_of_memory(folder):
    """The first process dies of a KeyError, and with it the store: the other one says what it saw, and ends with 1."""
    for case in OTHER:
        assert outcome_of(folder, case)["codes"] == [1, 1]
        assert not (folder / case["name"] / "oom_report.json").exists()


def test_a_stream_that_waits_is_not_asked_for_weights(folder):
    """The first process saves nothing for others, the newest periodic checkpoint stands, and both end soon."""
    assert (WAITING["rank"], WAITING["step"]) == (1, 2)
    found = outcome_of(folder, WAITING)
    assert found["codes"] == [75, 75]
    report = json.loads((folder / "nccl" / "oom_report.json").read_text())
    assert report["checkpoint"].endswith("checkpoint-2")


def test_machines_without_a_shared_disk_keep_their_parts(folder):
    assert outcome_of(folder, MACHINES)["codes"] == [0, 0]
    for rank in range(2):
        machine = folder / f"machine{rank}" / "own"
        assert sorted(path.name for path in machine.glob("checkpoint-*")) == [
            f"checkpoint-{step}" for step in (2, 4, 5)
        ]
        assert (machine / "checkpoint-5" / f"rng_state_{rank}.pth").is_file()
        assert not (machine / ".unfinished").exists()


def test_an_engine_that_shards_ends_all_its_processes(tmp_path):
    """ZeRO-3 cannot repeat a step: no hang, exit code 75, and the checkpoint before it is whole."""
    from conftest import ROOT
    from conftest import run as command

    config = ROOT / "accelerate_configs" / "cpu_x2_zero3.yaml"
    done = command(
        "accelerate",
        "launch",
        *flags(config_file=config, main_process_port=0),
        HERE / "sharded_oom.py",
        tmp_path,
        env={"PYTHONPATH": str(HERE)},
        timeout=200,
    )
    assert done.returncode != 0
    assert "exitcode  : 75" in done.stderr
    assert "DEEPSPEED cannot repeat a step" in done.stderr
    report = json.loads((tmp_path / "oom_report.json").read_text())
    assert (report["step"], report["kind"]) == (2, "device")
    assert report["checkpoint"].endswith("checkpoint-2"), "the newest that the run wrote before"
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def test_one_process_goes_on_where_two_left_off(folder, tmp_path):
    """The effective batch stays, and so do the samples of every step."""
    from small_runs import train

    shutil.copytree(folder / ENDED[1]["name"], tmp_path / "out")
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 5}
    found = train(tmp_path / "out", resume=True, **fields)
    (event,) = [event for event in found.events if event["event"] == "effective_batch_kept"]
    assert event["gradient_accumulation_steps"] == 4
    assert torch.allclose(found.weights, weights(folder, "plain"), rtol=0, atol=1e-9)


# ---- every stage, either process, the first step and a later one: 36 failures

AT = [(rank, step) for rank in (0, 1) for step in (0, 3)]
# eval_steps and save_steps are 3, so that evaluation and save come after the third step.
STAGES = {
    "forward": {"recovers": True, "micro": 0},
    "backward": {"recovers": True, "micro": 0},
    "clipping": {"recovers": True},
    "optimizer": {"recovers": True},
    "backward while gradients are reduced": {"recovers": False, "phase": "backward", "micro": 1},
    "optimizer twice": {"recovers": False, "phase": "optimizer", "times": 2},
    "optimizer midway": {"recovers": False},
    "clipping twice": {"recovers": False, "phase": "clipping", "times": 2},
    "data": {"recovers": False},
}
AFTER_A_STEP = {
    "eval": {"fields": {"eval_strategy": "steps", "eval_steps": 3}},
    "save": {"fields": {"save_strategy": "steps", "save_steps": 3}},
}


def _case(stage: str, rank: int, step: int, **about) -> dict:
    case = {"name": f"{stage}-{rank}-{step}", "rank": rank, "phase": stage, "step": step, "micro": 0}
    return case | {name: value for name, value in about.items() if name != "recovers"}


TABLE = [(about["recovers"], _case(stage, *at, **about)) for stage, about in STAGES.items() for at in AT]
TABLE = TABLE[: -len(AT)] + [
    (False, case)
    for rank in (0, 1)
    for case in (
        _case("data", rank, 3),
        _case("data", rank, 0),
        _case("eval", rank, 3, **AFTER_A_STEP["eval"]),
        _case("save" if rank == 0 else "save of random states", rank, 3, **AFTER_A_STEP["save"]),
    )
]


def _quiet(phase: str) -> str | None:
    """A phase in which nothing fails, with the optimizer that the checkpoint is of."""
    return phase if phase.startswith("optimizer") else None


def _lost(case: dict) -> bool:
    """The first process, which saves the weights, has broken off in the middle of an update."""
    return case["phase"] == "optimizer midway" and case["rank"] == 0


def _saved(case: dict) -> list[str]:
    """Checkpoints of which one must be there: the first process may have finished the step that the other has not."""
    updates = case["phase"] in ("clipping", "optimizer", "optimizer midway") and case["rank"] == 1
    return [f"checkpoint-{step}" for step in (case["step"], case["step"] + updates) if step]


@pytest.mark.sweep  # 40 failures; RECOVERED and ENDED have those of forward and backward
@pytest.mark.parametrize("half", [0, 1])
def test_every_stage_ends_as_documented(half, tmp_path):
    """Recovered to the weights of an uninterrupted run, or both end with 75 and a checkpoint from which it is resumed
    to those weights."""
    assert len(TABLE) == 40
    table = TABLE[half::2]
    resumed = [
        case | {"name": f"resumed {case['name']}", "resumed": case["name"], "times": 0, "phase": _quiet(case["phase"])}
        for recovers, case in table
        if not recovers and case["step"] and not _lost(case)
    ]
    run(tmp_path, PLAIN, *(case for _, case in table), *resumed)
    plain = weights(tmp_path, "plain")
    for recovers, case in table:
        assert outcome_of(tmp_path, case)["codes"] == ([0, 0] if recovers else [75, 75]), case
        if recovers:
            assert torch.allclose(weights(tmp_path, case["name"]), plain, rtol=0, atol=1e-9), case
            continue
        report = json.loads((tmp_path / case["name"] / "oom_report.json").read_text())
        assert (report["checkpoint"] is None) == (_lost(case) or not _saved(case)), case
        if report["checkpoint"]:
            checkpoint = Path(report["checkpoint"])
            assert checkpoint.parent == tmp_path / case["name"] and checkpoint.name in _saved(case), case
            files = {file.name for file in checkpoint.glob("rng_state*")}
            assert files == {"rng_state_0.pth", "rng_state_1.pth"}, case
    for case in resumed:
        assert outcome_of(tmp_path, case)["codes"] == [0, 0], case
        assert torch.allclose(weights(tmp_path, case["name"]), plain, rtol=0, atol=1e-9), case
