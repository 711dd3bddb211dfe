"""Several machines, played by launchers on this one: SLURM's scripts, a launcher that is killed, fewer machines."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT, flags, run

from hf_memopt.errors import InputError
from hf_memopt.presets import get_preset
from hf_memopt.presets.preset import on_machines
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
    return flags(
        model_name_or_path=builtin_model,
        dataset_name=rows,
        max_length=32,
        held_out=0,
        save_strategy="steps",
        save_steps=2,
        samples=0,
        learning_rate="1e-3",
        lr_scheduler_type="constant",
        logging_steps=1,
    )


def losses(folder: Path, step: int) -> dict[int, float]:
    state = json.loads((folder / "out" / f"checkpoint-{step}" / "trainer_state.json").read_text())
    return {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}


def slurm(folder: Path, machines: int, *arguments: str) -> dict:
    """The report of a run that the exported SLURM script started."""
    done = subprocess.run(
        ["bash", folder / "slurm.sbatch", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(folder, SLURM_NNODES=str(machines)),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "out" / "memory_report.json").read_text())


@pytest.mark.engines
def test_two_machines_one_killed_both_again_then_one(exported, arguments):
    """launch.sh on two machines; when one launcher is ended the other ends too. The SLURM script resumes from the last
    checkpoint with both, then with one machine at the same effective batch: every step once."""
    port = str(21000 + os.getpid() % 20000)
    first, second = (
        subprocess.Popen(
            ["sh", str(exported / "launch.sh"), *arguments, "--max_steps", "40"],
            cwd=exported,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment(exported, MACHINE_RANK=rank, MAIN_PROCESS_IP="127.0.0.1", MAIN_PROCESS_PORT=port),
        )
        for rank in "01"
    )
    _wait_for(exported / "out" / "checkpoint-2" / "trainer_state.json", first)
    os.killpg(second.pid, signal.SIGTERM)
    assert second.wait(60) != 0 and first.wait(60) != 0
    reached = max(int(folder.name.split("-")[1]) for folder in (exported / "out").glob("checkpoint-*"))
    steps = {}
    for machines in (2, 1):
        reached += 2
        onwards = ("--max_steps", str(reached), "--resume_from_checkpoint", "true")
        report = slurm(exported, machines, *arguments, *onwards)
        assert report["global_step"] == reached
        settings = report["settings"]
        micro, accumulation = settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"]
        assert micro * accumulation * 2 * machines == 8
        now = losses(exported, reached)
        assert set(now) == set(range(1, reached + 1)) and {step: now[step] for step in steps} == steps
        steps = now


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
    for name, machines, error in (
        ("a100_80gb_x8", 0, "at least 1"),
        ("rtx_4090", 2, "for one device"),
        ("h100_80gb_x16_nodes", 2, "16 machines already"),
    ):
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
