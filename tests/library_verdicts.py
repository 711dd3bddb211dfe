"""What accelerate and DeepSpeed themselves say of a file: their own launch command, Accelerator, plugin and engine."""

import json
import math
import os
import subprocess
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import yaml
from accelerate.state import AcceleratorState

from hf_memopt.child_process import in_child

# Before the children, which are forks.
_IMPORTED_ONCE = (
    "accelerate.commands.launch",
    "deepspeed.runtime.engine",
    "torch.distributed.fsdp",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.integrations.deepspeed",
)
OF_THE_MACHINE = (ImportError, OSError)  # a package, a program or a port that another machine has


def accelerate_verdicts(paths):
    """Of each file, why `accelerate launch` or the Accelerator that it starts refuses it; None where they accept."""
    for module in _IMPORTED_ONCE:
        import_module(module)
    return {path: in_child(_accelerate_verdict, str(path)) for path in paths}


def deepspeed_verdicts(configs):
    """Of each content of a JSON, why transformers, accelerate's plugin or DeepSpeed refuses it."""
    return in_child(_deepspeed_verdicts, list(configs))


def _accelerate_verdict(path):
    AcceleratorState._reset_state(reset_partial_state=True)  # of the tests before
    os.chdir(os.path.dirname(path))  # pdsh's launcher writes .deepspeed_env there
    try:
        with open(path) as file:
            content = yaml.safe_load(file)
        environment = _launched(path, content)
        if environment is not None:
            _started(environment, content)
        return None
    except OF_THE_MACHINE:
        return None
    except (Exception, SystemExit) as error:
        return None if "not available on this machine" in str(error) else f"{type(error).__name__}: {error}"


def _launched(path, content):
    """The environment that the launch command gives its processes."""
    from accelerate.commands import launch
    from torch.distributed import run

    argv, environments = ["--config_file", path], []
    if "num_processes" not in content:
        argv += ["--num_processes", "2"]
    if content.get("machine_rank", 0) == 0:  # of the first the launcher asks whether the port is free
        argv += ["--machine_rank", "1"]

    def torchrun(args):
        run.config_from_args(args)
        environments.append(dict(os.environ))

    real = subprocess.Popen

    def popen(*args, **kwargs):
        if kwargs.get("env") is None:  # nvidia-smi and the like
            return real(*args, **kwargs)
        environments.append(dict(kwargs["env"]))
        return SimpleNamespace(wait=lambda: 0, returncode=0)

    with (
        mock.patch.object(run, "run", torchrun),
        mock.patch.object(subprocess, "Popen", popen),
        mock.patch.object(launch, "tpu_launcher", lambda args: None),
        mock.patch.object(launch, "sagemaker_launcher", lambda *args: None),
        mock.patch.object(launch.sys, "exit", lambda code: None),
    ):
        launch.launch_command(launch.launch_command_parser().parse_args([*argv, "train.py"]))
    return environments[0] if environments else None


def _started(environment, content):
    """Build in this process what the script's Accelerator() builds in each."""
    from accelerate import Accelerator, DeepSpeedPlugin, ParallelismConfig
    from torch import cuda, distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    asked = content.get("num_processes", 2)
    processes = int(asked) if isinstance(asked, int | str) else 1
    environment.pop("ACCELERATE_CPU_AFFINITY", None)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("ACCELERATE_USE_DEEPSPEED") == "true":
        plugin = DeepSpeedPlugin()
        plugin.set_mixed_precision(environment["ACCELERATE_MIXED_PRECISION"])
        del os.environ["ACCELERATE_CONFIG_DS_FIELDS"]  # which speaks of the YAML
        config = {key: value for key, value in plugin.deepspeed_config.items() if key != "steps_per_print"}
        if (refusal := _deepspeed_verdicts([json.loads(json.dumps(config))])[0]) is not None:
            raise ValueError(refusal)
        if environment.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
            ParallelismConfig()
        return
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    with mock.patch.multiple(
        cuda,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: processes,
        current_device=lambda: 0,
        set_device=lambda device: None,
        is_bf16_supported=lambda *args: True,
        get_device_capability=lambda *args: (9, 0),
        get_device_name=lambda *args: "NVIDIA H100",
    ):
        if content["distributed_type"] not in ("NO", "MULTI_CPU"):
            os.environ.update(ranks)
            distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
        Accelerator()


def _deepspeed_verdicts(configs):
    return [_deepspeed_verdict(config) for config in configs]


def _deepspeed_verdict(config):
    from accelerate import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    try:
        sizes = [
            config.get(name, "auto") for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        ]
        sizes = [1 if size in ("auto", None) else size for size in sizes]
        whole = config.get("train_batch_size", "auto")
        processes = max(1, whole // math.prod(sizes)) if type(whole) is int else 1
        filled = HfTrainerDeepSpeedConfig(config)
        args = _training_arguments(config, sizes, processes)
        filled.trainer_config_process(args)
        if "zero_optimization" in config:  # without it the plugin refuses, and DeepSpeed does not
            filled = DeepSpeedPlugin(hf_ds_config=filled).hf_ds_config
            # accelerate.Accelerator._prepare_deepspeed
            filled.config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        model = SimpleNamespace(config=SimpleNamespace(hidden_size=64))
        filled.trainer_config_finalize(args, model, 100)
        sized = {key: value for key, value in filled.config.items() if key != "steps_per_print"}
        with _processes(processes):
            _initialized(sized)
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _training_arguments(config, sizes, processes):
    """TrainingArguments that agree with what a JSON says."""

    def said(block, name, default):
        value = (config.get(block) or {}).get("params", {}).get(name, "auto")
        return default if value == "auto" else value

    def switch(name):
        return config.get(name, {}).get("enabled", False) is True

    clipping = config.get("gradient_clipping", "auto")
    betas = said("optimizer", "betas", [0.9, 0.999])
    rate = said("optimizer", "lr", said("scheduler", "warmup_max_lr", 1e-3))
    return SimpleNamespace(
        world_size=processes,
        per_device_train_batch_size=sizes[0],
        gradient_accumulation_steps=sizes[1],
        max_grad_norm=1.0 if clipping == "auto" else clipping,
        learning_rate=rate,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        adam_epsilon=said("optimizer", "eps", 1e-8),
        weight_decay=said("optimizer", "weight_decay", 0.0),
        save_on_each_node=False,
        fp16=switch("fp16"),
        bf16=switch("bf16"),
        fp16_full_eval=False,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: said("scheduler", "warmup_num_steps", 10),
    )


@contextmanager
def _processes(number):
    from deepspeed import comm

    with mock.patch.object(comm, "get_rank", lambda: 0), mock.patch.object(comm, "get_world_size", lambda: number):
        yield


def _initialized(config):
    """DeepSpeed's configuration, and what its engine asserts of the names in it (runtime.engine)."""
    import torch
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine

    read = DeepSpeedConfig(config)
    if read.optimizer_name is not None:
        assert DeepSpeedEngine._is_supported_optimizer(None, read.optimizer_name), read.optimizer_name
    if (name := read.scheduler_name) is not None:
        assert hasattr(lr_schedules, name) or hasattr(torch.optim.lr_scheduler, name), name
