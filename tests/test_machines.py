"""Several machines, played by launchers on this one: SLURM's scripts, a launcher that is killed, fewer machines."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, run

from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset
from hf_memopt.presets.base import on_machines
from hf_memopt.presets.shipped_configs import shipped_sbatch

BIN = Path(sys.executable).parent
# SLURM is not here: scontrol names this machine, srun starts the command once for every machine.
SCONTROL = "#!/bin/sh\necho 127.0.0.1\n"
SRUN = """#!/bin/bash
shift
for ((node = 0; node < SLURM_NNODES; node++)); do SLURM_NODEID=$node "$@" & pids="$pids $!"; done
code=0
for pid in $pids; do wait $pid || code=$?; done
exit $code
"""


@pytest.fixture
def exported(tmp_path) -> Path:
    done = run("hf-memopt", "export", "cpu_x2", tmp_path / "run", "--machines", 2, "--recipe", "pretrain")
    assert done.returncode == 0 and "sbatch" in done.stdout, done.stderr
    folder = tmp_path / "run"
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / "slurm").mkdir(exist_ok=True)
        (tmp_path / "slurm" / name).write_text(text)
        (tmp_path / "slurm" / name).chmod(0o755)
    return folder


def environment(folder: Path, **more) -> dict[str, str]:
    paths = f"{folder.parent / 'slurm'}:{BIN}:{os.environ['PATH']}"
    return {**os.environ, "PATH": paths, "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": str(os.getpid()), **more}


@pytest.fixture
def arguments(jsonl, builtin_model) -> list[str]:
    rows = jsonl([{"text": f"Line {number} of a text about line {number}."} for number in range(400)])
    return ["--model_name_or_path", str(builtin_model), "--dataset_name", rows, "--max_length", "32", "--held_out",
            "0", "--save_strategy", "steps", "--save_steps", "2", "--samples", "0", "--learning_rate", "1e-3",
            "--lr_scheduler_type", "constant", "--logging_steps", "1"]  # fmt: skip


def losses(folder: Path, step: int) -> dict[int, float]:
    state = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def slurm(folder: Path, machines: int, *arguments: str):
    done = subprocess.run(["bash", folder / "slurm.sbatch", *arguments], capture_output=True, text=True, timeout=300,
                          env=environment(folder, SLURM_NNODES=str(machines)), cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out" / "memory_report.json").read_text())


def test_two_machines_then_one_keep_the_effective_batch(exported, arguments):
    """The exported SLURM script trains on two machines; on one it goes on with twice the accumulation."""
    two = slurm(exported, 2, *arguments, "--max_steps", "4")
    assert two["global_step"] == 4
    batch = two["settings"]["per_device_train_batch_size"] * two["settings"]["gradient_accumulation_steps"]
    assert batch * 4 == 8  # of two machines with two processes each
    one = slurm(exported, 1, *arguments, "--max_steps", "6")
    assert one["global_step"] == 6
    settings = one["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] * 2 == 8
    before, after = losses(exported, 4), losses(exported, 6)
    assert {step: after[step] for step in before} == before and set(after) == set(range(1, 7))


def test_a_launcher_that_is_killed_ends_the_other_and_both_go_on_from_there(exported, arguments, tmp_path):
    wanted = ["--max_steps", "8"]
    script = [str(exported / "launch.sh"), *arguments, *wanted]

    def start(port: int) -> list[subprocess.Popen]:
        return [
            subprocess.Popen(
                ["sh", *script], cwd=exported, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environment(exported, MACHINE_RANK=str(rank), MAIN_PROCESS_IP="127.0.0.1",
                                MAIN_PROCESS_PORT=str(port)), start_new_session=True,
            )
            for rank in range(2)
        ]  # fmt: skip

    port = 21000 + os.getpid() % 20000
    first, second = start(port)
    _wait_for(exported / "out" / "checkpoint-2" / "trainer_state.json", first)
    os.killpg(second.pid, signal.SIGTERM)
    began = time.monotonic()
    assert second.wait(60) != 0 and first.wait(60) != 0
    assert time.monotonic() - began < 60
    for launcher in start(port + 1):
        assert launcher.wait(200) == 0
    assert set(losses(exported, 8)) == set(range(1, 9))  # every step once
    report = json.loads((exported / "out" / "memory_report.json").read_text())
    assert report["global_step"] == 8


def _wait_for(file: Path, launcher: subprocess.Popen) -> None:
    for _ in range(1200):
        if file.is_file():
            return
        assert launcher.poll() is None, "the launcher ended by itself"
        time.sleep(0.1)
    raise AssertionError(f"{file} never came")


def test_more_machines():
    preset = on_machines(get_preset("a100_80gb_x8"), 4)
    assert (preset.processes, preset.machines, preset.effective_batch_size) == (32, 4, 64)
    assert preset.accelerate_config()["num_machines"] == 4 and preset.accelerate_config()["num_processes"] == 32
    assert on_machines(get_preset("a100_80gb_x8"), 16).effective_batch_size == 128  # one sample a device at least
    for name, machines, error in (("a100_80gb_x8", 0, "at least 1"), ("rtx_4090", 2, "for one device"),
                                  ("h100_80gb_x16_nodes", 2, "16 machines already")):  # fmt: skip
        with pytest.raises(InputError, match=error):
            on_machines(get_preset(name), machines)


def test_shipped_slurm_scripts_are_what_the_presets_say():
    folder = ROOT / "accelerate_configs" / "slurm"
    assert {path.name: path.read_text() for path in folder.glob("*.sbatch")} == shipped_sbatch(), "run make configs"
    for path in folder.glob("*.sbatch"):
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0
        text = path.read_text()
        config = next(word for word in text.replace("'", " ").split() if word.startswith("accelerate_configs/"))
        assert (ROOT / config).is_file() and "--effective_batch_size" in text
