"""hf-memopt calibrate: what was measured on a device is used for that device alone, and named."""

import getpass
import json
import logging
import os
import platform
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import BIN, ROOT, run
from transformers import LlamaConfig

from hf_memopt import estimate, get_preset
from hf_memopt.contrib.calibration.measurements import constants_from, measurements, reserved_errors
from hf_memopt.contrib.calibration.training import Setting, predict
from hf_memopt.errors import InputError
from hf_memopt.estimator.accounting.work import Kernel
from hf_memopt.estimator.timing.speed import kernel_seconds
from hf_memopt.files import write_json
from hf_memopt.hardware import get_hardware, list_hardware, measured
from hf_memopt.hardware.constants import TABLE, assumed
from hf_memopt.hardware.measured import MEASURABLE, constant, device_path, measured_on, read_device_file, versions_here
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.profiles import Plan
from hf_memopt.planner.sketch import Traced
from hf_memopt.units import MIB

CARD = "rtx_4090"
CONSTANTS = {
    "context_bytes": 412 * MIB,
    "workspace_bytes": 16 * MIB,
    "matmul_flops_per_second": 1.4e14,
    "bandwidth_bytes_per_second": 9e11,
    "host_link_bytes_per_second": 2.4e10,
    "launch_seconds": 4e-6,
    "step_time_ratio": 1.3,
}
VERSIONS = {"runtime": "13.0", "driver": "570.86"}  # a recorded card's: no such card is here
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=256)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and nothing remembered of another one."""
    monkeypatch.setenv("HF_MEMOPT_CACHE", str(tmp_path / "cache"))
    measured._newest.cache_clear()
    yield tmp_path / "cache"
    measured._newest.cache_clear()


def content(name: str = CARD, **changes) -> dict:
    device = get_hardware(name)
    return {
        "format": 1,
        "rehearsal": False,
        "device": {key: getattr(device, key) for key in ("name", "label", "backend", "architecture", "memory")},
        "versions": {**versions_here(), **VERSIONS},
        "date": "2026-11-20",
        "constants": CONSTANTS,
        "reserved_errors": [-0.004, 0.012],
        "measurements": {},
        **changes,
    }


def keep(name: str = CARD, **changes) -> Path:
    """A file in the cache, as calibrate writes it."""
    made = content(name, **changes)
    path = device_path(get_hardware(name), made["versions"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, made)
    measured._newest.cache_clear()
    return path


def predicted(hardware: str = CARD):
    return estimate(CONFIG, {"per_device_train_batch_size": 2, "bf16": True}, 32, hardware)


def test_every_assumption_has_a_source_and_holds_for_some_device():
    devices = [get_hardware(name) for name in list_hardware()]
    for row in TABLE:
        assert len(row.source) > 10 and row.unit and not row.measured
        assert any(assumed(row.name, device) is row for device in devices), f"{row.name}: {row.source} is never used"
    for device in devices:
        for name in {row.name for row in TABLE}:
            assert assumed(name, device).value >= 0
    with pytest.raises(KeyError):
        assumed("nothing", devices[0])


@pytest.mark.parametrize(
    ("card", "share"), [("rtx_4070_ti_super", 1.0), ("rtx_4090_laptop", 0.8), ("l4", 0.55), ("l40s", 0.8)]
)
def test_a_row_of_some_cards_holds_for_these_alone(card, share):
    """A GeForce runs above the clock it is sold with; a laptop's, and a board with little power, do not."""
    assert assumed("matmul_efficiency", get_hardware(card)).value == share


def test_what_is_written_is_read():
    path = keep()
    assert (
        path.name
        == "nvidia_geforce_rtx_4090-"
        + "-".join(f"{key}_{value}" for key, value in (("torch", versions_here()["torch"]), *VERSIONS.items()))
        + ".json"
    )
    file = measured_on(get_hardware(CARD))
    assert file == read_device_file(path) and file.constants == CONSTANTS
    found = constant("context_bytes", get_hardware(CARD))
    assert found.measured and found.value == 412 * MIB
    assert found.source.startswith("measured on NVIDIA GeForce RTX 4090 (2026-11-20, torch ")
    assert not constant("matmul_efficiency", get_hardware(CARD)).measured


@pytest.mark.slow
def test_an_estimate_uses_it_and_names_it():
    before = predicted()
    keep()
    after = predicted()
    workspace = 2 * (CONSTANTS["workspace_bytes"] - 8_519_680)  # of forward's thread and of backward's
    assert after.peak_allocated_bytes - before.peak_allocated_bytes == workspace
    assert after.device_bytes - before.device_bytes == workspace + (412 - 512) * MIB
    assert any("not checked on a GPU yet" in note for note in before.notes)
    note = next(note for note in after.notes if "context 412 MiB" in note)
    assert "cuBLAS workspace 16.0 MiB: measured on NVIDIA GeForce RTX 4090 (2026-11-20" in note
    assert "CUDA 13.0, driver 570.86" in note
    assert any("of 2 jobs on this device it was -0.4% to +1.2% off" in note for note in after.notes)


@pytest.mark.slow
def test_no_other_device_is_affected():
    before = [predicted(name) for name in ("rtx_3090", "cpu")]
    keep()
    assert [predicted(name) for name in ("rtx_3090", "cpu")] == before
    keep("rtx_3090", constants={"context_bytes": 300 * MIB}, reserved_errors=[])
    assert constant("context_bytes", get_hardware(CARD)).value == 412 * MIB
    assert constant("context_bytes", get_hardware("rtx_3090")).value == 300 * MIB
    assert not constant("workspace_bytes", get_hardware("rtx_3090")).measured


@pytest.mark.slow
def test_it_can_be_left_out(monkeypatch):
    before = predicted()
    keep()
    monkeypatch.setenv("HF_MEMOPT_CALIBRATION", "off")
    assert predicted() == before


def test_plans_count_with_its_rates_and_name_them():
    card = get_hardware(CARD)
    traced = Traced({}, {}, Counter({Kernel(optimizer=False, flops=10**13, bytes=10**8, matmul=2): 2}))
    spec = JobSpec(model="a model", preset=get_preset(CARD))
    assert "measured on" not in " ".join(Plan(spec, [], []).notes)
    before = kernel_seconds(traced.kernels, card)[0]
    efficiency, bandwidth = (assumed(f"{name}_efficiency", card).value for name in ("matmul", "bandwidth"))
    assert before == pytest.approx(2 * (1e13 / (165.2e12 * efficiency) + 1e8 / (1008e9 * bandwidth)))
    keep()
    # The matmul that was measured has 3 bytes for 8192 FLOPs; this one has fewer, and other kernels than copies.
    rate = CONSTANTS["bandwidth_bytes_per_second"] * bandwidth / assumed("copy_efficiency", card).value
    computing = 1e13 * (1 / 1.4e14 - 3 / 8192 / rate)
    assert kernel_seconds(traced.kernels, card)[0] == pytest.approx(1.3 * 2 * (computing + 1e8 / rate))
    estimate = SimpleNamespace(step_seconds=1.0, speed_kind="dense models", own_runs=None)
    profile = SimpleNamespace(name="balanced", choice=None, estimate=estimate)
    notes = " ".join(Plan(spec, [profile], []).notes)
    assert "matmuls, 16 bits 140.0 TFLOP/s" in notes and "host to device 24.0 GB/s" in notes
    assert notes.count("measured on NVIDIA GeForce RTX 4090") == 2


@pytest.mark.parametrize("key", ["torch", "runtime", "driver"])
def test_a_file_of_other_versions_is_ignored_and_named_once(key, monkeypatch, caplog):
    here = {**versions_here(), **VERSIONS}
    monkeypatch.setattr(measured, "versions_here", lambda: here)
    keep()
    assert measured_on(get_hardware(CARD)) is not None
    keep(versions={**here, key: "1.2.3"}).rename(device_path(get_hardware(CARD), here))
    measured._newest.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert measured_on(get_hardware(CARD)) is None
        predicted()
    (record,) = caplog.records
    assert f"1.2.3 (here {here[key]}): ignored; run hf-memopt calibrate again" in record.getMessage()


def test_the_file_of_this_pytorch_counts_beside_another_ones(caplog):
    keep(versions={**versions_here(), **VERSIONS, "torch": "1.0"}, constants={"context_bytes": 1})
    keep()
    assert measured_on(get_hardware(CARD)).constants == CONSTANTS and not caplog.records


DAMAGED = {
    "torn": '{"format": 1, "dev',
    "empty": "",
    "a list": "[]",
    "deep": "[" * 5000,
    "not UTF-8": b"\xff\xfe",
    "NaN": json.dumps(content(constants={"context_bytes": float("nan")})),
    "text": json.dumps(content(constants={"context_bytes": "412"})),
    "true": json.dumps(content(constants={"context_bytes": True})),
    "negative": json.dumps(content(constants={"context_bytes": -1})),
    "too large": json.dumps(content(constants={"context_bytes": 10**15})),
    "an integer beyond floats": json.dumps(content(constants={"context_bytes": 10**400})),
    "unknown constant": json.dumps(content(constants={"contxt_bytes": 1})),
    "another format": json.dumps(content(format=2)),
    "no date": json.dumps(content(date=None)),
    "a label that a terminal obeys": json.dumps(content(device={**content()["device"], "label": "\x1b[2J"})),
    "a label that is too long": json.dumps(content(device={**content()["device"], "label": 201 * "x"})),
    "no label": json.dumps(content(device={**content()["device"], "label": ""})),
    "a label of two lines": json.dumps(content(device={**content()["device"], "label": "x\ny"})),
    "an error below -1": json.dumps(content(reserved_errors=[-1.01])),
    "an error above 100": json.dumps(content(reserved_errors=[100.1])),
    "a device that is none": json.dumps(content(device="RTX 4090")),
    "errors that are none": json.dumps(content(reserved_errors=["none"])),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_ignored_and_named_once(damage, caplog):
    path = keep()
    made = DAMAGED[damage]
    path.write_bytes(made if isinstance(made, bytes) else made.encode())
    with caplog.at_level(logging.WARNING):
        assert measured_on(get_hardware(CARD)) is None and measured_on(get_hardware(CARD)) is None
    (record,) = caplog.records
    text = record.getMessage()
    assert str(path) in text and "run hf-memopt calibrate again" in text and "\n" not in text and "\x1b" not in text
    with pytest.raises(InputError):
        read_device_file(path)


def test_values_at_their_borders_are_read(tmp_path):
    made = content(device={**content()["device"], "label": 200 * "x"}, reserved_errors=[-1, 100])
    (tmp_path / "x.json").write_text(json.dumps(made))
    file = read_device_file(tmp_path / "x.json")
    assert file.device["label"] == 200 * "x" and file.reserved_errors == (-1, 100)


def test_a_folder_or_a_missing_cache_is_no_file(cache, caplog):
    cache.write_text("a file where the cache should be")
    assert measured_on(get_hardware(CARD)) is None
    cache.unlink()
    path = keep()
    path.unlink()
    path.mkdir()
    assert measured_on(get_hardware(CARD)) is None and len(caplog.records) == 1


def test_a_rehearsal_is_of_no_card():
    keep(rehearsal=True)
    assert measured_on(get_hardware(CARD)) is None


def job(**changes) -> dict:
    return {
        "outcome": "measured",
        "outcome_of_training": "trained",
        "reserved_bytes": 1000,
        "allocator": "expandable_segments:True",
        "step_seconds": 0.3,
        "predicted": {"reserved_bytes": {"expandable": 1010, "segments": 1}, "step_seconds": 0.2},
        **changes,
    }


def test_constants_follow_from_what_was_measured():
    card = get_hardware(CARD)
    found = {
        "context": {"outcome": "measured", "context_bytes": 412 * MIB, "workspace_bytes": None},
        "rates": {
            "outcome": "measured",
            "matmul_flops_per_second": {"bfloat16": 1e14, "float32": 1e13},
            "bandwidth_bytes_per_second": float("inf"),
        },
        "job: a": job(),
        "job: b": job(allocator=None, outcome_of_training="out of memory"),
        "job: c": {"outcome": "failed", "reason": "killed"},
    }
    assert constants_from(found, card) == {
        "context_bytes": 412 * MIB,
        "matmul_flops_per_second": 1e14,
        "step_time_ratio": pytest.approx(1.5),
    }
    assert reserved_errors(found) == [0.01]
    assert constants_from({}, card) == {} and reserved_errors({}) == []
    assert {*constants_from(found, card)} <= {*MEASURABLE}


def test_settings_follow_what_the_card_computes_in():
    fields = {name: measurements(get_hardware(name), False)[2].setting.fields for name in (CARD, "t4", "apple_m2_8gb")}
    assert fields == {CARD: {"bf16": True}, "t4": {"fp16": True}, "apple_m2_8gb": {}}


def test_without_a_card_it_says_so(command):
    code, out, err = command("calibrate")
    assert code == 2 and not out
    assert err.strip().splitlines()[-1].startswith("error: PyTorch sees no CUDA, ROCm or MPS device here")
    assert "--rehearse" in err


def test_bad_input_is_one_line(command, tmp_path):
    other = tmp_path / "notes.json"
    other.write_text('{"mine": 1}')
    for words, expected in (
        (("--export", tmp_path / "nowhere" / "file.json"), "there is no folder"),
        (("--export", other), "is no calibration"),
        (("--budget", "0"), "above 0"),
        (("--budget", "nan"), "above 0"),
    ):
        code, out, err = command("calibrate", "--rehearse", *words)
        assert code == 2 and not out and expected in err, err
    assert other.read_text() == '{"mine": 1}'


def test_help_has_examples():
    done = run("hf-memopt", "calibrate", "--help", env={"COLUMNS": "80"})
    assert done.returncode == 0 and "hf-memopt calibrate --budget 120" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_files_that_were_contributed_are_calibrations():
    for path in (ROOT / "benchmarks" / "results" / "devices").glob("*.json"):
        file = read_device_file(path)
        assert not file.rehearsal and file.constants, path


def test_the_documentation_has_a_table_as_soon_as_there_are_results(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from docs_tables.memory import assumptions, measured_cards

    assert measured_cards(tmp_path) == "Measured on these cards: nothing yet."
    assert all(row.source in assumptions() for row in TABLE)
    (tmp_path / "devices").mkdir()
    write_json(tmp_path / "devices" / "rtx_4090.json", content())
    made = measured_cards(tmp_path)
    assert "| NVIDIA GeForce RTX 4090 | 412 MiB | 16.0 MiB | 140.0 TFLOP/s |" in made
    assert "−0.4% to +1.2% | 2026-11-20, torch" in made
    results = {
        "hardware": {"label": "a card"},
        "rows": [{"date": "2026-11-21"}],
        "versions": {"torch": "2.13.0"},
        "driver": "570.86",
        "rehearsal": True,
    }
    tables = {"Memory, predicted beside measured": [{"case": "a", "error of reserved_bytes": -0.02}]}
    (tmp_path / "gpu" / "card").mkdir(parents=True)
    write_json(tmp_path / "gpu" / "card" / "tables.json", tables)
    write_json(tmp_path / "gpu" / "card" / "results.json", results)
    assert measured_cards(tmp_path) == made, "a rehearsal in the documentation"
    write_json(tmp_path / "gpu" / "card" / "results.json", results | {"rehearsal": False})
    assert "| a card | 1 |  | 2.0% (−2.0% to −2.0%) |  | 2026-11-21, torch 2.13.0" in measured_cards(tmp_path)


@pytest.mark.parametrize("fields", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_a_job_has_a_predicted_step(fields):
    """Of 32-bit matmuls, too, of which estimates predict none: what was measured is compared with it."""
    found = predict(Setting("full", "smollm2-135m", fields).rehearsed(), get_hardware("rtx_4090"))
    assert found["step_seconds"] > 0 and found["fits"]


@pytest.mark.slow
@pytest.mark.sweep  # a minute of 8 measurements, each a process; a budget of one second ends the next test's
@pytest.mark.timeout(1800)
def test_a_rehearsal_is_stopped_and_continues(tmp_path):
    target = tmp_path / "card.json"
    words = [str(BIN / "hf-memopt"), "calibrate", "--rehearse", "--budget", "1500", "--export", str(target)]
    process = subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # the tests may ignore it
    )
    while not (target.is_file() and json.loads(target.read_text())["measurements"]):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "and kept: the same command continues" in err and "Traceback" not in err
    kept = json.loads(target.read_text())["measurements"]
    assert 0 < len(kept) < 8 and read_device_file(target).rehearsal
    done = run(*words, "--json", env={"COLUMNS": "80"}, timeout=1700)
    assert done.returncode == 0, done.stderr
    assert f"8 measurements, {len(kept)} of them done by an earlier call" in done.stderr
    printed, exported = json.loads(done.stdout), json.loads(target.read_text())
    assert kept.items() <= exported["measurements"].items() and len(exported["measurements"]) == 8
    assert all(row["outcome"] == "measured" for row in exported["measurements"].values()), done.stderr
    assert printed["left"] == [] and printed["constants"] == exported["constants"]
    assert exported["device"]["label"].startswith("rehearsal on ")
    jobs = [row for name, row in exported["measurements"].items() if name.startswith("job: ")]
    assert all(row["predicted"]["allocated_bytes"] == pytest.approx(row["allocated_bytes"], rel=0.03) for row in jobs)
    text = target.read_text()
    for private in (platform.node(), str(Path.home()), str(tmp_path), str(ROOT)):
        assert private not in text, private
    assert f'"{getpass.getuser()}"' not in text
    again = run(*words, env={"COLUMNS": "80"})
    assert again.returncode == 0 and "8 of them done by an earlier call" in again.stderr
    assert max(map(len, again.stdout.splitlines())) <= 80 or str(target) in again.stdout
    assert not list(Path(os.environ["HF_MEMOPT_CACHE"]).glob("devices/*")), "a rehearsal was kept as a card's"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_budget_ends_it_and_an_unwritable_file_is_refused_before_anything_is_measured(tmp_path):
    target = tmp_path / "card.json"
    done = run("hf-memopt", "calibrate", "--rehearse", "--export", target, "--budget", "1")
    assert done.returncode == 0 and "the budget is spent: 8 of 8 are left" in done.stderr, done.stderr
    assert read_device_file(target).constants == {}
    done = run("hf-memopt", "calibrate", "--rehearse", "--export", "/proc/card.json")
    assert done.returncode == 2 and "cannot be written" in done.stderr and "Traceback" not in done.stderr


def test_a_rehearsal_is_the_job_with_two_short_samples_at_most():
    for micro, rehearsed in ((1, 1), (2, 2), (16, 2)):
        made = Setting("full", micro=micro, sizes={"vocab_size": 7}).rehearsed()
        assert (made.micro, made.length, made.sizes["vocab_size"], made.kind) == (rehearsed, 32, 7, "full")
