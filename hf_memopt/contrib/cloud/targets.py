"""A preset as a job of SkyPilot, Hugging Face Jobs or Kubernetes: the files that each project's own tool starts.

What runs on every machine is the same script, train.sh, which names no path of the machine that wrote it.
"""

import shlex
from collections.abc import Mapping
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.packages import SOURCE, extras_for
from hf_memopt.presets.launch_script import machine_words
from hf_memopt.presets.preset import Preset

# How each target's own tool starts what was written; {} is the folder.
_STARTS = {
    "skypilot": "cd {} && sky launch skypilot.yaml",
    "hf-jobs": "sh {}/hf_jobs.sh",
    "kubernetes": "kubectl apply -f {}/kubernetes.yaml",
}
# An image with pip and a C compiler, which torch.compile needs; torch's wheels bring CUDA.
_IMAGES = {"cuda": "python:3.12", "cpu": "python:3.12", "rocm": "rocm/pytorch:latest"}
# SkyPilot's names of accelerators (`sky gpus list --all`).
_SKYPILOT = {
    "a10": "A10",
    "a100_40gb": "A100",
    "a100_80gb": "A100-80GB",
    "a10g": "A10G",
    "b200": "B200",
    "h100_80gb": "H100",
    "h200": "H200",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx_3090": "RTX3090",
    "rtx_4090": "RTX4090",
    "rtx_5090": "RTX5090",
    "t4": "T4",
    "v100_32gb": "V100-32GB",
}
# Flavors by number of devices (huggingface_hub.JobHardware, 2.4; `hf jobs hardware` has prices).
_HF_JOBS = {
    "a100_80gb": {1: "a100-large", 4: "a100x4", 8: "a100x8"},
    "a10g": {1: "a10g-large", 2: "a10g-largex2", 4: "a10g-largex4"},
    "cpu": {1: "cpu-upgrade", 2: "cpu-performance"},
    "h200": {1: "h200", 2: "h200x2", 4: "h200x4", 8: "h200x8"},
    "l4": {1: "l4x1", 4: "l4x4"},
    "l40s": {1: "l40sx1", 4: "l40sx4", 8: "l40sx8"},
    "rtx_pro_6000_server": {1: "rtx-pro-6000", 2: "rtx-pro-6000x2", 4: "rtx-pro-6000x4", 8: "rtx-pro-6000x8"},
    "t4": {1: "t4-medium"},
}


def cloud_files(
    preset: Preset, target: str, arguments: list[str], config_files: Mapping[str, str]
) -> tuple[dict[str, str], str]:
    """The files of a job, file name -> text; and the command that starts it, with {} for the folder.

    Args:
        target: skypilot | hf-jobs | kubernetes.
        arguments: the recipe's name and its arguments.
        config_files: accelerate.yaml and training_arguments.json, which name no other file.

    Raises:
        InputError: the target does not offer the preset's devices.
    """
    if preset.hardware.backend not in _IMAGES:
        raise InputError(
            f"target={target} rents no {preset.hardware.label}: take a preset of an NVIDIA or AMD card, or cpu"
        )
    make = {"skypilot": _skypilot, "hf-jobs": _hf_jobs, "kubernetes": _kubernetes}[target]
    files = {**config_files, "train.sh": _train_script(preset, arguments)}
    return files | make(preset, files), _STARTS[target]


def _train_script(preset: Preset, arguments: list[str]) -> str:
    """The script that each machine of the job runs, from the folder that it lies in."""
    recipe, *words = arguments
    extras = extras_for(recipe, preset.strategy)
    if preset.machines > 1:  # a save that fails shows in the first minute
        words = [*words, "--probe_save", "true"]
    lines = [
        "#!/bin/sh",
        f"# {preset.name}, method {preset.method}. More arguments of {recipe}.py may follow this script's name.",
        "set -e",
        'here=$(cd "$(dirname "$0")" && pwd)',
        "# Where hf_memopt is missing, pip installs HF_MEMOPT_PACKAGE: the address of a wheel or a repository;",
        "# by default the wheel beside this script.",
        f'package="${{HF_MEMOPT_PACKAGE:-{SOURCE}[{extras}]}}"',
        'python3 -c \'import hf_memopt\' 2>/dev/null || (cd "$here" && python3 -m pip install -q "$package") || {',
        '    echo "train.sh: hf_memopt cannot be installed from $package: put its wheel" \\',
        '        "(python -m build --wheel) beside this script, or set HF_MEMOPT_PACKAGE" >&2',
        "    exit 2",
        "}",
        *(f'export {key}="${{{key}:-{value}}}"' for key, value in preset.environment.items()),
        """recipes=$(python3 -c 'from hf_memopt.files import shipped; print(shipped("recipes"))')""",
        'exec python3 -m accelerate.commands.launch --config_file "$here/accelerate.yaml" \\',
        " ".join(["   ", *machine_words(preset), f'"$recipes/{recipe}.py" \\']),
        f"    {shlex.join(words)} \\",
        '    --config "$here/training_arguments.json" --output_dir "${OUTPUT_DIR:-out}" "$@"',
    ]
    return "\n".join(lines) + "\n"


def _job_name(preset: Preset) -> str:
    """A name as Kubernetes (RFC 1123) and SkyPilot take it."""
    return f"{preset.name}-{preset.method}".replace("_", "-").lower()


def _devices(preset: Preset) -> int:
    """Devices of each machine."""
    return preset.processes // preset.machines


def _skypilot(preset: Preset, files: Mapping[str, str]) -> dict[str, str]:
    """skypilot.yaml: a task (docs.skypilot.co, "SkyPilot YAML"), started in its folder."""
    resources: dict[str, Any] = {"disk_size": 512}
    if preset.hardware.backend != "cpu":
        if preset.hardware.name not in _SKYPILOT:
            raise InputError(
                f"target=skypilot has no name for {preset.hardware.name}: "
                f"take a preset of one of {', '.join(_SKYPILOT)}, or change `accelerators` in its file"
            )
        resources["accelerators"] = f"{_SKYPILOT[preset.hardware.name]}:{_devices(preset)}"
    task = {
        "name": _job_name(preset),
        "num_nodes": preset.machines,
        "resources": resources,
        "workdir": ".",
        "run": 'export MACHINE_RANK="$SKYPILOT_NODE_RANK"\n'
        'export MAIN_PROCESS_IP=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        "sh train.sh\n",
    }
    comment = (
        "Start it in this folder: sky launch -c my-cluster skypilot.yaml (--secret HF_TOKEN for gated models)\n"
        "# Fetch the results: rsync -Pavz my-cluster:sky_workdir/out ."
    )
    return {"skypilot.yaml": _yaml([task], comment)}


def _hf_jobs(preset: Preset, files: Mapping[str, str]) -> dict[str, str]:
    """hf_jobs.sh: the command `hf jobs run`, which copies the folder to a bucket of yours and mounts it."""
    flavors = _HF_JOBS.get(preset.hardware.name, {})
    if preset.machines > 1 or preset.processes not in flavors:
        offered = ", ".join(f"{name} × {count}" for name, row in _HF_JOBS.items() for count in row)
        raise InputError(
            f"target=hf-jobs has no machine with {preset.processes} × {preset.hardware.name}: take one of {offered}"
        )
    lines = [
        "#!/bin/sh",
        f"# {preset.name}, method {preset.method}, as a Hugging Face Job. Arguments of the recipe may follow.",
        "# The folder goes to a bucket of yours; when the job is over, `hf` says how to fetch out/ from there.",
        'here=$(cd "$(dirname "$0")" && pwd)',
        f"exec hf jobs run --flavor {flavors[preset.processes]} --timeout 24h --secrets HF_TOKEN \\",
        '    --env HF_MEMOPT_PACKAGE="${HF_MEMOPT_PACKAGE:-}" --env OUTPUT_DIR=/job/out --volume "$here:/job:rw" \\',
        f'    {_IMAGES[preset.hardware.backend]} sh /job/train.sh "$@"',
    ]
    return {"hf_jobs.sh": "\n".join(lines) + "\n"}


def _kubernetes(preset: Preset, files: Mapping[str, str]) -> dict[str, str]:
    """kubernetes.yaml: a PyTorchJob of Kubeflow's training operator, its files and its disk."""
    name = _job_name(preset)
    metadata = {"name": name}
    access = "ReadWriteOnce" if preset.machines == 1 else "ReadWriteMany"
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": dict(files)}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": metadata,
        "spec": {"accessModes": [access], "resources": {"requests": {"storage": "500Gi"}}},
    }
    volumes = [
        {"name": "job", "configMap": {"name": name}},
        {"name": "out", "persistentVolumeClaim": {"claimName": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    replica = {
        "restartPolicy": "OnFailure",
        "template": {"spec": {"containers": [_container(preset)], "volumes": volumes}},
    }
    replicas = {"Master": {"replicas": 1, **replica}}
    if preset.machines > 1:
        replicas["Worker"] = {"replicas": preset.machines - 1, **replica}
    job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {"runPolicy": {"backoffLimit": 3, "cleanPodPolicy": "Running"}, "pytorchReplicaSpecs": replicas},
    }
    comment = (
        "Start it: kubectl apply -f kubernetes.yaml, where Kubeflow's training operator runs.\n"
        "# Where the image has no hf_memopt: HF_MEMOPT_PACKAGE is the address of its wheel or repository.\n"
        "# For gated models: kubectl create secret generic hf-token --from-literal=HF_TOKEN=…"
    )
    return {"kubernetes.yaml": _yaml([config_map, claim, job], comment)}


def _container(preset: Preset) -> dict[str, Any]:
    """The operator sets RANK, WORLD_SIZE and MASTER_ADDR of pods; accelerate sets those of processes."""
    start = (
        'export MACHINE_RANK="$RANK" MAIN_PROCESS_IP="$MASTER_ADDR"; unset RANK WORLD_SIZE; exec sh /job/train.sh "$@"'
    )
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": _IMAGES[preset.hardware.backend],
        "command": ["sh", "-c", start, "train.sh"],
        "env": [
            {"name": "HF_HOME", "value": "/out/huggingface"},
            {"name": "OUTPUT_DIR", "value": "/out/run"},
            {"name": "HF_MEMOPT_PACKAGE", "value": ""},  # a ConfigMap holds no wheel
            {
                "name": "HF_TOKEN",
                "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "HF_TOKEN", "optional": True}},
            },
        ],
        "volumeMounts": [
            {"name": "job", "mountPath": "/job"},
            {"name": "out", "mountPath": "/out"},
            {"name": "shm", "mountPath": "/dev/shm"},  # worker processes pass batches through it
        ],
    }
    resource = {"cuda": "nvidia.com/gpu", "rocm": "amd.com/gpu"}.get(preset.hardware.backend)
    if resource:
        container["resources"] = {"limits": {resource: str(_devices(preset))}}
    return container


def _yaml(documents: list[dict], comment: str) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        """Texts of several lines as blocks; no anchors, which kubectl takes and people do not read."""

        def ignore_aliases(self, data):
            return True

    style = {False: None, True: "|"}
    Dumper.add_representer(
        str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style["\n" in text])
    )
    return f"# {comment}\n" + yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000)
