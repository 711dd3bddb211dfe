"""Exported jobs of SLURM, SkyPilot, Hugging Face Jobs and Kubernetes, against the fields that each documents."""

import json
import os
import shutil

import pytest
import yaml
from conftest import BIN, ROOT, flags, run

from hf_memopt.contrib.cloud import targets

# SkyPilot 0.14, docs.skypilot.co/en/latest/reference/yaml-spec.html.
SKYPILOT = {"name", "workdir", "num_nodes", "resources", "envs", "secrets", "volumes", "file_mounts", "setup", "run"}
# Kubeflow's training operator 1.9, kubeflow.org_pytorchjobs.yaml.
PYTORCH_JOB = {"runPolicy", "pytorchReplicaSpecs", "elasticPolicy", "nprocPerNode"}
RUN_POLICY = {"backoffLimit", "cleanPodPolicy", "activeDeadlineSeconds", "ttlSecondsAfterFinished", "suspend"}
REPLICA = {"replicas", "restartPolicy", "template"}


def _export(command, folder, preset, target, *more):
    code, _, errors = command("export", preset, folder, "--target", target, *more)
    assert code == 0, errors
    return {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}


@pytest.mark.parametrize("target", ["hf-jobs", "kubernetes", "skypilot"])
def test_jobs_elsewhere_name_no_path_of_this_machine(target, command, tmp_path):
    words = ("--strategy", "zero3", "--", "--dataset_name", "my data")
    files = _export(command, tmp_path / "run", "a100_80gb_x8", target, *words)
    assert {"accelerate.yaml", "train.sh", "training_arguments.json"} < files.keys()
    for name, text in files.items():
        assert str(tmp_path) not in text and str(ROOT) not in text, name
    assert "--dataset_name 'my data'" in files["train.sh"]
    assert "PYTORCH_ALLOC_CONF" in files["train.sh"] and "--effective_batch_size 64" in files["train.sh"]


def test_skypilot_task(command, tmp_path):
    files = _export(command, tmp_path / "run", "h100_80gb_x16_nodes", "skypilot")
    (task,) = yaml.safe_load_all(files["skypilot.yaml"])
    assert task.keys() <= SKYPILOT
    assert task["num_nodes"] == 16 and task["resources"]["accelerators"] == "H100:8"
    assert "SKYPILOT_NODE_RANK" in task["run"] and "$MACHINE_RANK" in files["train.sh"]


def test_kubernetes_job(command, tmp_path):
    files = _export(command, tmp_path / "run", "h100_80gb_x16_nodes", "kubernetes", "--recipe", "dpo")
    config, claim, job = yaml.safe_load_all(files["kubernetes.yaml"])
    assert [one["kind"] for one in (config, claim, job)] == ["ConfigMap", "PersistentVolumeClaim", "PyTorchJob"]
    assert {name: files[name] for name in config["data"]} == config["data"]
    spec = job["spec"]
    assert job["apiVersion"] == "kubeflow.org/v1" and spec.keys() <= PYTORCH_JOB
    assert spec["runPolicy"].keys() <= RUN_POLICY
    replicas = spec["pytorchReplicaSpecs"]
    assert {name: one["replicas"] for name, one in replicas.items()} == {"Master": 1, "Worker": 15}
    for one in replicas.values():
        assert one.keys() == REPLICA
        (container,) = one["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator sets MASTER_ADDR and RANK in this one alone
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        mounted = {one["name"] for one in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in one["template"]["spec"]["volumes"]}
    assert "hf_memopt-0.1.0-py3-none-any.whl[trl,deepspeed]" in files["train.sh"]


def test_flavors_are_those_of_the_hub():
    from huggingface_hub import JobHardware

    flavors = {flavor for row in targets._HF_JOBS.values() for flavor in row.values()}
    assert flavors <= {flavor.value for flavor in JobHardware}


def test_devices_are_in_the_catalog():
    from hf_memopt.hardware import list_hardware

    assert targets._HF_JOBS.keys() | targets._SKYPILOT.keys() <= set(list_hardware())


@pytest.mark.slow
def test_hf_takes_the_command(command, tmp_path):
    """`hf jobs run --dry-run`, which parses everything and asks no server."""
    files = _export(command, tmp_path / "run", "l40s_x4", "hf-jobs", "--method", "lora")
    script = tmp_path / "run" / "hf_jobs.sh"
    script.write_text(files["hf_jobs.sh"].replace("hf jobs run", f"{BIN / 'hf'} jobs run --dry-run"))
    done = run("sh", script, "--max_steps", "7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "l40sx4" in done.stdout and "sh /job/train.sh --max_steps 7" in done.stdout


@pytest.mark.parametrize(
    ("preset", "more", "message"),
    [
        ("apple_m2_8gb", ("--target", "hf-jobs"), "rents no Apple M2"),
        ("rtx_4090", ("--target", "hf-jobs"), "has no machine with 1 × rtx_4090: take one of"),
        ("rtx_3070", ("--target", "skypilot"), "has no name for rtx_3070"),
        ("rtx_4090", ("--target", "kubernets"), "Did you mean 'kubernetes'?"),
        ("rtx_4090", ("--target", "slurm", "--yaml-only"), "leave one out"),
    ],
)
def test_what_a_target_cannot_do_is_refused(preset, more, message, command, tmp_path):
    code, _, errors = command("export", preset, tmp_path / "run", *more)
    assert code == 2 and message in errors and len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_slurm_for_one_device(command, tmp_path):
    files = _export(command, tmp_path / "run", "a100_80gb", "slurm", "--method", "lora", "--", "--max_steps", "9")
    assert "#SBATCH --gpus-per-node=1" in files["slurm.sbatch"]
    assert "--max_steps 9" in files["slurm.sbatch"] and "--max_steps 9" in files["launch.sh"]


@pytest.mark.slow
def test_what_every_machine_runs_trains(command, tmp_path):
    """With the folder elsewhere, and the operator's variables as it sets them."""
    quick = flags(max_steps=2, max_length=32, held_out=8, samples=0)
    _export(command, tmp_path / "run", "cpu", "kubernetes", "--", *quick)
    shutil.move(tmp_path / "run", tmp_path / "elsewhere run")
    job = list(yaml.safe_load_all((tmp_path / "elsewhere run" / "kubernetes.yaml").read_text()))[-1]
    template = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]
    (container,) = template["spec"]["containers"]
    words = [word.replace("/job/train.sh", "'elsewhere run/train.sh'") for word in container["command"]]
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29599"}
    environment = os.environ | given | {"OUTPUT_DIR": str(tmp_path / "out"), "PATH": f"{BIN}:{os.environ['PATH']}"}
    done = run(*words, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "memory_report.json").read_text())
