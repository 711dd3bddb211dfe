"""The scripts that start exported files: launch.sh on one machine or on each of several, slurm.sbatch on a cluster."""

import json
import shlex
from pathlib import Path
from typing import Any

from hf_memopt.presets.preset import Preset

_PORT = "29500"
# torch's launcher would leave a folder torchelastic_* among the temporary ones, for logs that nothing here redirects
# (torch 2.13, elastic/multiprocessing/api.py: DefaultLogsSpecs makes none for os.devnull).
_NO_LOGS = "--log_dir /dev/null"


def machine_words(preset: Preset, port: str = _PORT) -> list[str]:
    """Arguments of `accelerate launch` on each of several machines: its rank and the address of the first."""
    if preset.machines == 1:
        return []
    return [
        "--machine_rank",
        '"$MACHINE_RANK"',
        "--main_process_ip",
        '"$MAIN_PROCESS_IP"',
        "--main_process_port",
        port,
    ]


def scripts(preset: Preset, folder: Path, recipe_command: list[str], batch: bool = False) -> dict[str, str]:
    """An exported folder's scripts: file name -> text. For several devices slurm.sbatch too, with `batch` for one."""
    if preset.machines > 1:  # a save that fails shows in the first minute, not at the end of the allocation
        recipe_command = [*recipe_command, "--probe_save", "true"]
    files = {"launch.sh": launch_script(preset, folder, recipe_command)}
    if preset.processes > 1 or batch:
        with_output = [*recipe_command, "--output_dir", shlex.quote(str(folder / "out"))]
        files["slurm.sbatch"] = sbatch_script(preset, shlex.quote(str(folder / "accelerate.yaml")), with_output)
    return files


def launch_script(preset: Preset, folder: Path, recipe_command: list[str]) -> str:
    """A shell script that starts a recipe with the folder's accelerate.yaml.

    Args:
        recipe_command: the recipe's file and its arguments, quoted where they must be.
    """
    config = shlex.quote(str(folder / "accelerate.yaml"))
    port = f'"${{MAIN_PROCESS_PORT:-{_PORT}}}"'
    started = (
        f"# Start it on each of the {preset.machines} machines, with MACHINE_RANK from 0 on and "
        "MAIN_PROCESS_IP of the first."
    )
    lines = [
        *("#!/bin/sh", _comment(preset, recipe_command)),
        *([started] if preset.machines > 1 else []),
        *_exports(preset),
        " ".join(["exec accelerate launch", _NO_LOGS, "--config_file", config, *machine_words(preset, port), "\\"]),
        f"    {' '.join(recipe_command)} \\",
        f"    --output_dir {shlex.quote(str(folder / 'out'))} \\",
        '    "$@"',
    ]
    return "\n".join(lines) + "\n"


def sbatch_script(preset: Preset, config: str, recipe_command: list[str]) -> str:
    """A SLURM batch script: one launcher a machine. Fewer machines (`sbatch --nodes`) keep the effective batch.

    Args:
        config: path of the accelerate configuration.
        recipe_command: the recipe's file and its arguments, quoted where they must be.
    """
    per_machine = preset.processes // preset.machines
    launcher = (
        f'exec accelerate launch {_NO_LOGS} --config_file {config} --num_machines "$SLURM_NNODES" '
        f'--num_processes "$((SLURM_NNODES * {per_machine}))" --machine_rank "$SLURM_NODEID" '
        '--main_process_ip "$0" --main_process_port "$1" "${@:2}"'
    )
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={preset.name}",
        f"#SBATCH --nodes={preset.machines}",
        "#SBATCH --ntasks-per-node=1",
        *([] if preset.hardware.backend == "cpu" else [f"#SBATCH --gpus-per-node={per_machine}"]),
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        _comment(preset, recipe_command),
        "set -e",
        "# All meet at the first machine. A launcher that is killed ends the others; a requeued job goes on from its",
        "# last checkpoint.",
        'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "port=$((20000 + SLURM_JOB_ID % 20000))",
        *_exports(preset),
        "srun --kill-on-bad-exit=1 bash -c \\",
        f"    {shlex.quote(launcher)} \\",
        f'    "$head" "$port" {" ".join(recipe_command)} "$@"',
    ]
    return "\n".join(lines) + "\n"


def _comment(preset: Preset, recipe_command: list[str]) -> str:
    name = Path(recipe_command[0].strip("'")).name
    return f"# {preset.name}, method {preset.method}. More arguments of {name} may follow this script's name."


def _exports(preset: Preset) -> list[str]:
    lines = [f'export {key}="${{{key}:-{value}}}"' for key, value in preset.environment.items()]
    if preset.hardware.backend == "cpu":
        # As many as accelerate 1.15 takes by itself, and warns of: physical cores, shared by the processes.
        share = preset.processes // preset.machines
        cores = f"import psutil; print(max(1, (psutil.cpu_count(logical=False) or 1) // {share}))"
        lines.append(f'export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$(python -c {shlex.quote(cores)})}}"')
    return lines


def as_word(value: Any) -> str:
    """A value as a word of a recipe's or accelerate's command line, which read YAML and JSON; quoted for a shell."""
    plain = isinstance(value, bool | dict | list) or value is None
    return shlex.quote(json.dumps(value) if plain else str(value))
