"""Checks of a job of several processes before minutes of loading, each with a fix in one sentence."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from hf_memopt.compatibility.resolve import cannot_start, parallel_sizes, resolve_engine
from hf_memopt.engines.engine import is_true
from hf_memopt.errors import InputError
from hf_memopt.hardware.compiler import abandoned_locks, compiler, has_libaio
from hf_memopt.units import gib

# ZeRO keeps of every trained weight an fp32 master and two states, and offloaded gradients in fp32 beside them
# (deepspeed.runtime.zero.stage3: fp32_partitioned_groups_flat, Adam's exp_avg and exp_avg_sq, grad_partitions).
_OFFLOADED_STATES = 16
_OFFLOADED_WEIGHTS = 2  # weights in 16 bits
# Of what is swapped to a disk, gradients and weights in 16 bits stay in host memory (stage3:
# grad_partitions_flat_buffer, param_groups_fp16_flat_cpu_memory), beside the buffers, and in the first step both of
# Adam's states, until they have been written (tests/trainer/test_engines.py).
_BESIDE_SWAPPED = 12
_BUFFERED = {"offload_param": 5, "offload_optimizer": 4}  # buffers (deepspeed.runtime.zero.offload_config)
_BUFFER = 100_000_000  # elements of a weights' buffer, by default
_GROUP = 1_000_000_000  # sub_group_size, by default: elements that the optimizer swaps at a time
_LEFT_ALONE = 0.9  # share of the host's free memory that may be used
_DISK_SPARE = 1.05  # of what is offloaded


@dataclass(frozen=True)
class Launch:
    """Facts that the checks look at.

    Attributes:
        world_size, per_host: processes, and those of them on this machine.
        weights, trained: numbers of parameters.
        largest: elements of the largest tensor among them.
        weight_bytes: of one loaded weight.
        deepspeed: its configuration; None without DeepSpeed.
        fsdp_efficient: FSDP's fsdp_cpu_ram_efficient_loading; None without FSDP.
        fsdp_offloads: FSDP's fsdp_offload_params.
        batches: DeepSpeed's three batch sizes as TrainingArguments have them.
        parallel: sizes of the parallel dimensions that were set.
        host_free: bytes.
        lockable: bytes that a process may lock in memory.
        compiles: whether DeepSpeed's operators can be built here: operator -> yes or no.
        locks: of operators whose compilation was killed.
        cannot_start: why DeepSpeed would not start at all; None where it would.
    """

    world_size: int = 1
    per_host: int = 1
    weights: int = 0
    trained: int = 0
    largest: int = 0
    weight_bytes: int = 2
    deepspeed: dict[str, Any] | None = None
    fsdp_efficient: bool | None = None
    fsdp_offloads: bool = False
    batches: dict[str, int] = field(default_factory=dict)
    parallel: dict[str, int] = field(default_factory=dict)
    host_free: int = 2**62
    lockable: int = 2**62
    compiles: dict[str, bool] = field(default_factory=dict)
    locks: list[Path] = field(default_factory=list)
    cannot_start: str | None = None

    def zero(self, part: str) -> dict[str, Any]:
        """offload_optimizer or offload_param of the DeepSpeed configuration."""
        return ((self.deepspeed or {}).get("zero_optimization") or {}).get(part) or {}

    @property
    def stage(self) -> int:
        """ZeRO's, 0 without it."""
        return ((self.deepspeed or {}).get("zero_optimization") or {}).get("stage", 0)


def problems(launch: Launch) -> Iterator[str]:
    """Every reason why a job would fail."""
    if launch.cannot_start:
        yield launch.cannot_start
    checks = (_sizes, _batches, _loading, _operators, _buffer_size, _buffer_count, _locked_memory, _host_memory, _disk)
    for check_part in checks:
        yield from check_part(launch)


def check(launch: Launch) -> None:
    """Raise for every reason at once: a job of many processes is expensive to start again for the next one.

    Raises:
        InputError: the job would fail.
    """
    if reasons := list(problems(launch)):
        raise InputError(f"preflight: {'; and '.join(reasons)}")


def _sizes(launch: Launch) -> Iterator[str]:
    product = 1
    for size in launch.parallel.values():
        product *= size
    if launch.parallel and product != launch.world_size:
        sizes = " × ".join(f"{name} {size}" for name, size in launch.parallel.items())
        yield (
            f"parallelism_config: {sizes} = {product} is not the number of processes, {launch.world_size}: set "
            f"num_processes={product}, or other sizes"
        )


def _batches(launch: Launch) -> Iterator[str]:
    for name, size in launch.batches.items():
        configured = (launch.deepspeed or {}).get(name, "auto")
        if configured not in ("auto", size):
            yield f'the DeepSpeed configuration says {name}={configured}, TrainingArguments {size}: write "auto" there'


def _loading(launch: Launch) -> Iterator[str]:
    """Every process that loads the whole model needs it in host memory."""
    if launch.fsdp_efficient is not False or launch.per_host == 1:
        return
    needed = launch.weights * launch.weight_bytes * launch.per_host
    if needed > _LEFT_ALONE * launch.host_free:
        yield (
            f"fsdp_cpu_ram_efficient_loading is off: {launch.per_host} processes would load {gib(needed)} into "
            f"{gib(launch.host_free)} of free host memory: set it to true"
        )


def _operators(launch: Launch) -> Iterator[str]:
    for part, operator in (("offload_optimizer", "cpu_adam"), ("offload_param", None)):
        device = launch.zero(part).get("device", "none")
        names = [
            name for name in (operator if device != "none" else None, "async_io" if device == "nvme" else None) if name
        ]
        for name in names:
            if not launch.compiles.get(name, True):
                needs = "libaio-dev and a C++ compiler" if name == "async_io" else "a C++ compiler (g++)"
                yield f"{part}.device={device} needs DeepSpeed's {name}, which cannot be built here: install {needs}"
    for lock in launch.locks:
        yield f"{lock} is left of a compilation that was killed, and DeepSpeed would wait for it for ever: delete it"


def _buffer_size(launch: Launch) -> Iterator[str]:
    """A weight's shard is swapped whole."""
    params, part = launch.zero("offload_param"), -(-launch.largest // launch.world_size)
    size = int(params.get("buffer_size", _BUFFER))
    if params.get("device") == "nvme" and part > size:
        yield (
            f"offload_param.buffer_size={size} is smaller than a process's part of the largest weight, {part} "
            f"elements: set buffer_size={part} or more in the DeepSpeed configuration"
        )


def _buffer_count(launch: Launch) -> Iterator[str]:
    """The optimizer swaps groups of weight, two states and gradient; while one is computed on, the one before it may
    be on its way out and the next on its way in."""
    states = launch.zero("offload_optimizer")
    if states.get("device") != "nvme" or launch.trained // launch.world_size <= _group(launch):
        return
    stages = 1 + bool(states.get("pipeline_read")) + bool(states.get("pipeline_write"))
    count = states.get("buffer_count", _BUFFERED["offload_optimizer"])
    if count < 4 * stages:
        yield (
            f"offload_optimizer.buffer_count={count} is too few for more than one group of weights: set it to "
            f"{4 * stages}, or turn pipeline_read and pipeline_write off"
        )


def _group(launch: Launch) -> int:
    return int((launch.deepspeed or {})["zero_optimization"].get("sub_group_size", _GROUP))


def _locked_memory(launch: Launch) -> Iterator[str]:
    """DeepSpeed's disk access fails where a buffer cannot be locked (csrc/pin_memory/page_alloc.cpp)."""
    if (needed := _buffers(launch)) > launch.lockable:
        yield (
            f"what is swapped to a disk passes through {gib(needed)} of locked memory a process, and "
            f"{gib(launch.lockable)} may be locked: ulimit -l unlimited, or a smaller buffer_size and "
            "sub_group_size in the DeepSpeed configuration"
        )


def _buffers(launch: Launch) -> int:
    """Bytes of one process's buffers between memory and disk: some weights', and whole groups of states in fp32."""
    params, states = launch.zero("offload_param"), launch.zero("offload_optimizer")
    size = 0
    if params.get("device") == "nvme":
        count = params.get("buffer_count", _BUFFERED["offload_param"])
        size += count * int(params.get("buffer_size", _BUFFER)) * _OFFLOADED_WEIGHTS
    if states.get("device") == "nvme":
        count = states.get("buffer_count", _BUFFERED["offload_optimizer"])
        size += count * min(_group(launch), launch.trained // launch.world_size) * 4
    return size


def _host_memory(launch: Launch) -> Iterator[str]:
    needed = _on_host(launch, "cpu") + launch.per_host * _buffers(launch)
    if "nvme" in {launch.zero(part).get("device") for part in _BUFFERED}:
        needed += int(_BESIDE_SWAPPED * launch.trained * launch.per_host / launch.world_size)
    if needed > _LEFT_ALONE * launch.host_free:
        yield (
            f"offloading to the host needs {gib(needed)} for the {launch.per_host} processes of this machine, "
            f"and {gib(launch.host_free)} are free: use more machines, offload_optimizer.device=nvme with a "
            "smaller sub_group_size, or LoRA"
        )


def _on_host(launch: Launch, device: str) -> int:
    """Bytes that this machine's processes offload to the host or to the disk."""
    share = launch.per_host / launch.world_size
    # FSDP2's fp32 weights, gradients and states are as many.
    by_fsdp = launch.fsdp_offloads and device == "cpu"
    offloads = by_fsdp or launch.zero("offload_optimizer").get("device") == device
    states = _OFFLOADED_STATES * launch.trained if offloads else 0
    weights = _OFFLOADED_WEIGHTS * launch.weights if launch.zero("offload_param").get("device") == device else 0
    return int((states + weights) * share)


def _disk(launch: Launch) -> Iterator[str]:
    paths = {
        launch.zero(part).get("nvme_path")
        for part in ("offload_optimizer", "offload_param")
        if launch.zero(part).get("device") == "nvme"
    }
    for path in paths:
        if not path or not Path(path).is_dir():
            yield (
                f"nvme_path={path} is not a folder on this machine: make it, or export with --nvme-path "
                "(hf-memopt export … --strategy zero3_offload_nvme --nvme-path FOLDER)"
            )
            continue
        if not os.access(path, os.W_OK):
            yield f"nvme_path={path} cannot be written to: choose a folder of yours"
        needed, free = int(_on_host(launch, "nvme") * _DISK_SPARE), shutil.disk_usage(path).free
        if needed > free:
            yield f"nvme_path={path} needs {gib(needed)} for what is offloaded, and {gib(free)} are free"


def describe_launch(args, config, task: str, dtype: str, adapters: bool = False) -> Launch:
    """The launch of this process.

    Args:
        args: TrainingArguments.
        config: the model's.
        dtype: of the loaded weights.
        adapters: they alone are trained, and their states are too few to count.
    """
    import psutil
    import torch

    from hf_memopt.estimator.tracing.model import weight_sizes

    sizes_of = weight_sizes(config, task)
    weights = sum(sizes_of)
    engine = resolve_engine(args)
    efficient = os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING")
    if args.fsdp:
        efficient = args.fsdp_config.get("cpu_ram_efficient_loading", False)  # Trainer asks nothing else
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    return Launch(
        world_size=args.world_size,
        per_host=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        weights=weights,
        trained=0 if adapters else weights,
        largest=max(sizes_of),
        weight_bytes=getattr(torch, dtype).itemsize,
        deepspeed=engine.deepspeed,
        fsdp_efficient=is_true(efficient) if engine.fsdp_version else None,
        fsdp_offloads=bool(engine.fsdp_version) and engine.offloads,
        batches={
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "train_batch_size": micro * accumulation * args.world_size,
        },
        parallel={name: size for name, size in parallel_sizes(args.parallelism_config).items() if size != 1},
        host_free=psutil.virtual_memory().available,
        lockable=_lockable(),
        compiles=(
            {"cpu_adam": compiler() is not None, "async_io": has_libaio()} if engine.deepspeed is not None else {}
        ),
        locks=abandoned_locks() if engine.deepspeed is not None else [],
        cannot_start=cannot_start(engine),
    )


def _lockable() -> int:
    """Bytes; root may lock as much as there is."""
    if os.name != "posix" or os.geteuid() == 0:
        return 2**62
    import resource

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return 2**62 if limit == resource.RLIM_INFINITY else limit


def check_sharded(model, stage: int) -> None:
    """Under ZeRO-3 every weight must have been sharded while it was loaded.

    Raises:
        InputError: whole weights lie on every process.
    """
    if stage != 3:
        return
    unsharded = [name for name, weight in model.named_parameters() if not hasattr(weight, "ds_numel")]
    # Adapters are created after loading and sharded by the engine.
    base = [name for name in unsharded if "lora_" not in name]
    if base:
        raise InputError(
            f"preflight: {len(base)} weights ({base[0]}, …) were loaded whole on every process: TrainingArguments "
            "must be made, and live, before from_pretrained, with zero3_init_flag: true in accelerate's configuration"
        )


@contextmanager
def quick_cpu_info(args) -> Iterator[None]:
    """While it lasts, py-cpuinfo's answer comes from lscpu, as DeepSpeed does itself where py-cpuinfo fails.

    py-cpuinfo 9 asks the processor in a child of a child, for whose end it waits in a busy loop, twice for each
    operator and process: two processes on two cores have been seen to wait for minutes. lscpu's answer has only the
    fields that DeepSpeed reads, so nobody else in the process may get it for longer than DeepSpeed is at work. It can
    go when DeepSpeed (0.19.8) asks once, or py-cpuinfo without a busy loop.

    Args:
        args: TrainingArguments; without DeepSpeed nothing is replaced.
    """
    info = _from_lscpu() if args.deepspeed_plugin is not None else None
    if not info or not info["arch"]:
        yield
        return
    import cpuinfo

    with mock.patch.object(cpuinfo, "get_cpu_info", lambda: info):
        yield


def _from_lscpu() -> dict | None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    return builder._backup_cpuinfo() if builder.command_exists("lscpu") else None
