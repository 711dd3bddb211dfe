"""accelerate's own answer to a configuration: its launcher, then its Accelerator, on as many GPUs as the file says.

The GPUs are made up, and the processes are torch's fake process group. Only for a child process: the environment and
what torch says of its devices stay changed.
"""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

_OF_LAUNCHERS = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_", "WORLD_SIZE", "RANK", "LOCAL_RANK")
_PROCESSES = "2"  # of a file that leaves their number to the command line


class Answer(NamedTuple):
    """What accelerate says.

    Attributes:
        error: why it refuses; None where it accepts.
        deepspeed: the DeepSpeed configuration that its plugin makes.
        missing: what an Accelerator here lacks, though the file is valid.
    """

    error: Exception | None = None
    deepspeed: dict[str, Any] | None = None
    missing: str = ""


def ask(content: Mapping[str, Any]) -> Answer:
    """What accelerate says of the content of its file."""
    import yaml
    from accelerate.state import AcceleratorState
    from torch import distributed

    # The state and the process group of the answer before, or of the parent, whose threads a fork has not: a group of
    # gloo waits for them for ever where it is destroyed, so that it is only forgotten.
    AcceleratorState._reset_state(reset_partial_state=True)
    distributed.GroupMember.WORLD = None
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    try:
        with tempfile.TemporaryDirectory(prefix="hf-memopt-") as folder:
            file = Path(folder) / "accelerate.yaml"
            file.write_text(yaml.safe_dump(dict(content)))
            _set_environment(environment)
            return Answer(deepspeed=_launch(str(file), "num_processes" in content))
    except (ImportError, OSError) as error:  # packages, mpirun and ports of another machine
        return Answer(missing=str(error))
    except (Exception, SystemExit) as error:  # SystemExit: torchrun's argument parser
        absent = "not available on this machine" in str(error)  # of FP8 (utils.launch, 1.15)
        return Answer(missing=str(error)) if absent else Answer(error)
    finally:
        _set_environment(environment)


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _launch(file: str, has_processes: bool) -> dict[str, Any] | None:
    """Do as `accelerate launch` does (commands.launch.launch_command, 1.15), up to the processes that it starts."""
    from accelerate.commands import launch
    from accelerate.utils.launch import prepare_simple_launcher_cmd_env

    processes = [] if has_processes else ["--num_processes", _PROCESSES]
    argv = ["--config_file", file, *processes, "train.py"]
    args, defaults, from_file = launch._validate_launch_command(launch.launch_command_parser().parse_args(argv))
    if args.tpu or defaults.compute_environment != "LOCAL_MACHINE":
        return None
    if args.machine_rank == 0:  # of the first it asks whether the port is free, which a running job has
        args.machine_rank = 1
    if args.use_deepspeed:
        return _deepspeed(args, defaults, from_file)
    if args.use_fsdp or args.use_megatron_lm or args.multi_gpu:
        from accelerate.utils.launch import prepare_multi_gpu_env
        from torch import distributed
        from torch.testing._internal.distributed.fake_pg import FakeStore

        environment = prepare_multi_gpu_env(args)
        _torchrun(args)
        processes = int(args.num_processes)
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes)}
        distributed.init_process_group("fake", rank=0, world_size=processes, store=FakeStore())
        _accelerator({**environment, **ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, processes)
    else:
        _accelerator(prepare_simple_launcher_cmd_env(args)[1], 1)
    return None


def _torchrun(args: Any) -> None:
    """What torchrun makes of the launcher's arguments."""
    from accelerate.utils.launch import _filter_args
    from torch.distributed import run

    run.config_from_args(_filter_args(args, run.get_args_parser(), ["--training_script", "train.py"]))


def _accelerator(environment: Mapping[str, str], devices: int) -> None:
    from accelerate import Accelerator

    _set_environment({name: value for name, value in environment.items() if name != "ACCELERATE_CPU_AFFINITY"})
    # GPUs that can do all that a file may ask of them.
    from torch import cuda

    answers = {
        **{"is_available": True, "is_initialized": True, "is_bf16_supported": True, "device_count": devices},
        **{"current_device": 0, "set_device": None, "get_device_capability": (9, 0), "get_device_name": "NVIDIA H100"},
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *args, answer=answer, **kwargs: answer)
    Accelerator()


def _deepspeed(args: Any, defaults: Any, from_file: bool) -> dict[str, Any]:
    """The configuration of accelerate's plugin; DeepSpeed itself is not imported."""
    from accelerate import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    fields = [*defaults.deepspeed_config.keys(), *(["mixed_precision"] if from_file else [])]
    args.deepspeed_fields_from_accelerate_config = ",".join(map(str, fields))
    command, environment = prepare_deepspeed_cmd_env(args)
    if command is None:  # else DeepSpeed's own launcher
        _torchrun(args)
    _set_environment(environment)
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(str(args.mixed_precision).lower())
    if args.use_parallelism_config:
        from accelerate import ParallelismConfig

        job = {"multi_device": False, "is_fsdp2": False, "distributed_type": "DEEPSPEED", "is_main_process": False}
        accelerator: Any = SimpleNamespace(**job, num_processes=int(args.num_processes))
        ParallelismConfig()._validate_accelerator(accelerator)
    return plugin.deepspeed_config
