"""Run this process as one rank of a job of any size, without the other ranks.

The engines are real: DeepSpeed's ZeRO and torch's fully_shard run their own code on fake tensors, over a process group
whose collectives do nothing. Only DistributedDataParallel, whose reducer is C++ that reads bytes, is replaced.
"""

import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import get_origin
from unittest import mock

import torch
from torch import _C, distributed
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.engines import DDP, FSDP, DeepSpeed, Engine, MeshEngine
from hf_memopt.engines.mesh import Mesh
from hf_memopt.estimator.accounting.known_values import tensor_from_values
from hf_memopt.estimator.patches import fake_disk
from hf_memopt.estimator.private_names import Part, check
from hf_memopt.packages import is_installed, require

_REAL_VALUES = Part.EVERY_JOB.relies_on(
    "torch.utils._python_dispatch:_disable_current_modes()",
    why="device meshes and 4-bit code tables need real values within a trace",
    until="torch has a public name for it",
)
_IN_OPERATOR = Part.DEEPSPEED.relies_on(
    "torch._C:_meta_in_tls_dispatch_include",
    why="tells a user's call of a constructor from an operator's",
)
_NUMBERS = itertools.count(-1, -1)  # of meshes; below 0, where no thread's number is
_GROUPS = itertools.count(1_000_000, 1_000_000)
_SYNC_BUFFER = 250 * 2**20  # bytes; the bucket in which DistributedDataParallel broadcasts a model at the start
# Variables that launchers set, which the traced job must not see.
_LAUNCHED = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")


@contextmanager
def fake_cluster(world_size: int, engine: Engine, ledger, rank: int = 0) -> Iterator[None]:
    """Act as one of `world_size` processes.

    Args:
        ledger: follows memory that FSDP frees by resizing storages.
        rank: of this process.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHED)}
    # Cleared for one process too: the traced Trainer must not join the job that this process is part of.
    with mock.patch.dict(os.environ, environment, clear=True):
        if engine.alone:
            yield
            return
        os.environ.update(rank_variables(world_size, rank, world_size))
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # accelerate sets it otherwise
        with process_group(world_size, rank), _FAKES[type(engine)](ledger):
            yield


def rank_variables(world_size: int, rank: int, local_world_size: int) -> dict[str, str]:
    """The environment by which one of several processes finds the others."""
    ranks = {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": local_world_size}
    return {**{key: str(value) for key, value in ranks.items()}, "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


_WORLD = Part.SEVERAL_DEVICES.replaces(
    "torch.distributed.distributed_c10d:_world",
    why="the fake process group must not meet, rename or destroy the real ones of this process",
    until="c10d can hold two worlds",
)
_NAMES = Part.SEVERAL_DEVICES.replaces(
    "torch.distributed.distributed_c10d:_unregister_all_process_groups",
    why="destroying the fake group would forget the names of the real ones",
    until="c10d can hold two worlds",
)
_FORGOTTEN = Part.SEVERAL_DEVICES.relies_on(
    "torch.distributed.distributed_c10d:_World",
    "torch.distributed.distributed_c10d:_unregister_process_group",
    why="the fake groups are forgotten one by one",
    until="c10d can hold two worlds",
)
_STORE = Part.SEVERAL_DEVICES.relies_on(
    "torch.testing._internal.distributed.fake_pg:FakeStore",
    why="lets one process be rank r of N; importing the module registers the backend `fake`",
)


@contextmanager
def process_group(world_size: int, rank: int) -> Iterator[None]:
    """A fake process group with one existing rank, independent of any real group of this process."""
    check(Part.SEVERAL_DEVICES)
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with (
        _WORLD.replaced(_world=_own_world(c10d._World)),
        _NAMES.replaced(_unregister_all_process_groups=lambda: None),
        # init_process_group() installs a hook that prefixes uncaught errors with the rank.
        mock.patch.object(sys, "excepthook", sys.excepthook),
    ):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            names = list(c10d._world.pg_names.values())
            distributed.destroy_process_group()
            for name in names:
                c10d._unregister_process_group(name)


def _own_world(kind: type):
    """The state through which c10d finds its groups, of its own: destroy_process_group() clears registries that all
    worlds share, real groups included."""
    properties = {name: value.fget for name, value in vars(kind).items() if isinstance(value, property)}
    own: dict = {name: {} for name, get in properties.items() if get_origin(get.__annotations__["return"]) is dict}
    # Numbers that no real group gets, and none of another world: a script's own is there while its job is traced.
    return type("OwnWorld", (kind,), {**own, "group_count": next(_GROUPS)})()


_BACKEND = Part.DEEPSPEED.replaces(
    "deepspeed.comm.comm:cdb",
    why="DeepSpeed's one communication backend a process; the trace has one over the fake group",
    until="deepspeed.comm can hold two backends",
)
_COMPARED = Part.DEEPSPEED.replaces(
    "deepspeed.runtime.zero.partitioned_param_coordinator:assert_ints_same_as_other_ranks",
    why="compares values with ranks that do not exist",
)
_ADAM = Part.DEEPSPEED.replaces(
    "deepspeed.ops.adam:DeepSpeedCPUAdam(model_params, lr)",
    "deepspeed.ops.adam:FusedAdam(params, lr)",
    why="their C++ reads bytes",
)
_DISK = Part.DEEPSPEED.replaces(
    "deepspeed.ops.op_builder:AsyncIOBuilder.load(self)",
    why="its C++ reads and writes bytes; fake_disk.Handle takes the same buffers",
)
_WEIGHTS = Part.DEEPSPEED.replaces(
    "deepspeed.runtime.zero.partition_parameters:Init.param_id",
    why="real ranks know their weights by this counter; one rank's trace must not advance it",
    until="the counter belongs to an engine",
)
_TENSOR = Part.DEEPSPEED.replaces(
    "deepspeed.runtime.zero.partition_parameters:_orig_torch_tensor",
    why="zero.Init puts it in the place of torch.tensor when it ends, and the trace's own reads known values",
    until="zero.Init restores what it found",
)
_CONSTRUCTORS = Part.DEEPSPEED.replaces(
    "deepspeed.runtime.zero.partition_parameters:zero_wrapper_for_fp_tensor_constructor(fn, target_fp_dtype, "
    "target_device)",
    why="fake tensors are made with torch's constructors, too, whose 16 bits would be remembered as the operator's",
)
_MODULES = Part.DEEPSPEED.replaces(
    "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__",
    why="numbers modules with a counter in its default argument `count=[0]`",
    until="the counter belongs to an engine",
)


@contextmanager
def _deepspeed(ledger) -> Iterator[None]:
    """DeepSpeed on the fake process group: CPU tensors, no shared-memory kernels, no checks across ranks."""
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    # DeepSpeed 0.19's CPU accelerator runs numactl to count devices, for every bucket of gradients.
    os.environ["LOCAL_SIZE"] = "1"
    require("deepspeed", "an estimate of ZeRO")
    import deepspeed

    check(Part.DEEPSPEED)
    from deepspeed.utils import groups, logger

    groups_before = dict(vars(groups))
    try:
        with (
            mock.patch.object(logger, "disabled", True),
            fake_accelerator(),
            _COMPARED.replaced(assert_ints_same_as_other_ranks=lambda *_: None),
            _ADAM.replaced(DeepSpeedCPUAdam=KernelAdam, FusedAdam=KernelAdam),
            _DISK.replaced(load=fake_disk.loader(ledger)),
            _WEIGHTS.replaced(param_id=0),
            _TENSOR.replaced(_orig_torch_tensor=tensor_from_values(torch.tensor)),
            _CONSTRUCTORS.replaced(
                zero_wrapper_for_fp_tensor_constructor=_outside_operators(
                    _CONSTRUCTORS.original("zero_wrapper_for_fp_tensor_constructor")
                )
            ),
            _MODULES.replaced(__defaults__=([0],)),
            # ZeRO-3 replaces torch's linear for good: replaced by itself here, so that it is restored.
            mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
        ):
            deepspeed.init_distributed(dist_backend="fake", verbose=False)
            yield
    finally:
        vars(groups).update(groups_before)


def _outside_operators(wrap):
    """zero.Init's wrapper of a constructor, which leaves calls from within an operator on fake tensors alone."""

    def wrap_constructor(make, **target):
        wrapped = wrap(make, **target)
        return lambda *args, **kwargs: (make if _C._meta_in_tls_dispatch_include() else wrapped)(*args, **kwargs)

    return wrap_constructor


@contextmanager
def fake_accelerator() -> Iterator[None]:
    """DeepSpeed on this process's CPU, where it is installed, whatever accelerator it found: without kernels that read
    shared memory of ranks that do not exist, and with groups that it forgets afterwards."""
    if not is_installed("deepspeed"):
        yield
        return
    import deepspeed
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class FakeAccelerator(CPU_Accelerator):
        def create_op_builder(self, op_name):
            return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)

    accelerator = deepspeed.accelerator.get_accelerator()
    deepspeed.accelerator.set_accelerator(FakeAccelerator())
    try:
        with _BACKEND.replaced(cdb=None):
            yield
    finally:
        deepspeed.accelerator.set_accelerator(accelerator)


_STORAGE = Part.FSDP2.replaces(
    "torch.distributed.fsdp._fully_shard._fsdp_param:alloc_storage(tensor)",
    "torch.distributed.fsdp._fully_shard._fsdp_param:free_storage(tensor)",
    why="gathered weights are freed by resizing their storage, which no dispatch mode sees",
    until="UntypedStorage.resize_ can be observed",
)
_INPUTS = Part.FSDP2.replaces(
    "torch.distributed.fsdp._fully_shard._fsdp_collectives:_get_param_all_gather_inputs(fsdp_params)",
    why="shards in host memory are copied to the device before they are gathered: in a trace both are one device",
    until="fully_shard has a hook before the gathering",
)
_REDUCED = Part.FSDP2.replaces(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward(self)",
    why="gradients come to a shard without autograd's hooks",
    until="fully_shard has a hook after the reduction",
)
_SHAPES = Part.FSDP2.replaces(
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached(self, op_schema)",
    why="finds a result's shape by computing it on fake tensors of the whole size, which are no memory of the job",
    until="DTensor finds shapes on meta tensors",
)


@contextmanager
def following_fsdp(ledger) -> Iterator[None]:
    """Let the ledger follow FSDP2 where dispatch modes and autograd hooks cannot.

    Shards that the ledger has on the host come to the device to be gathered, and their gradients leave it.
    """
    reduce, find = _REDUCED.original("post_backward"), _SHAPES.original("_propagate_tensor_meta_non_cached")
    inputs_of = _INPUTS.original("_get_param_all_gather_inputs")

    def followed(resize):
        def resize_and_follow(tensor):
            resize(tensor)
            ledger.resized(tensor)

        return resize_and_follow

    def find_uncounted(*args, **kwargs):
        with mock.patch.object(ledger, "paused", True):
            return find(*args, **kwargs)

    def copied_inputs(weights):
        return [inputs for weight in weights for inputs in copied(weight)] if on_host(weights) else inputs_of(weights)

    def copied(weight):
        with mock.patch.object(weight, "_sharded_param_data", weight._sharded_param_data.clone()):
            return inputs_of([weight])

    def on_host(weights) -> bool:
        return any(ledger.on_host(weight.sharded_param) for weight in weights)

    def reduce_and_classify(group, *args, **kwargs):
        reduce(group, *args, **kwargs)
        for weight in group.fsdp_params:
            gradient = weight.sharded_param.grad
            if gradient is None or ledger.on_host(gradient):
                continue
            if on_host([weight]):
                gradient._local_tensor = gradient._local_tensor.clone()
                ledger.pin(gradient)
            else:
                ledger.classify(gradient, "gradients")
        # Backward begins with the head and ends with the embedding and the root's other weights, whose peaks grow
        # differently with the layers.
        beside = "the embeddings" if ledger.passed_layers() else "the head"
        where, layer = getattr(group.modules[0], "place_in_model", (beside, None))
        ledger.enter(f"{ledger.phase}: gradients of {where}", layer=layer)

    with (
        _STORAGE.replaced(**{name: followed(_STORAGE.original(name)) for name in ("alloc_storage", "free_storage")}),
        _INPUTS.replaced(_get_param_all_gather_inputs=copied_inputs),
        _REDUCED.replaced(post_backward=reduce_and_classify),
        _SHAPES.replaced(_propagate_tensor_meta_non_cached=find_uncounted),
    ):
        yield


_MESHES = Part.FSDP2.replaces(
    "accelerate:ParallelismConfig.build_device_mesh(self, device_type)",
    "accelerate:ParallelismConfig._validate_accelerator(self, accelerator)",
    why="meshes need real values, and accelerate refuses them without an accelerator (1.15)",
    until="accelerate builds meshes on the CPU",
)
_LAYOUT = Part.FSDP2.replaces(
    "torch.distributed.device_mesh:DeviceMesh.__init__(self, device_type)",
    why="lays out ranks in a tensor whose values it reads",
    until="DeviceMesh leaves the current modes by itself",
)


@contextmanager
def _meshes() -> Iterator[None]:
    """Build device meshes outside the fake tensor mode and without an accelerator."""
    build, init = _MESHES.original("build_device_mesh"), _LAYOUT.original("__init__")
    number = next(_NUMBERS)  # DTensor caches what it did on a mesh, and an earlier trace's groups are gone

    def build_with_values(config, device_type):
        with _disable_current_modes():
            return build(config, device_type)

    def init_with_values(mesh, *args, **kwargs):
        with _disable_current_modes():
            init(mesh, *args, **kwargs)
        mesh._thread_id = number  # part of a mesh's hash (torch 2.13), by which DTensor's cache tells meshes apart

    with (
        _MESHES.replaced(build_device_mesh=build_with_values, _validate_accelerator=lambda *_: None),
        _LAYOUT.replaced(__init__=init_with_values),
    ):
        yield


@contextmanager
def _sharding(ledger) -> Iterator[None]:
    with following_fsdp(ledger), _meshes():
        yield


DATA_PARALLEL = Part.DDP.replaces(
    "torch.nn.parallel:DistributedDataParallel(module, device_ids, output_device)",
    why="its reducer is C++ that reads gradients' bytes; under FSDP2 accelerate wraps with it on the CPU",
    until="the reducer runs on fake tensors, and accelerate starts FSDP2 on the CPU",
)


def _replicas(ledger):
    # The name is in the error of a script that asks the wrapper for what its model has: model.config.
    replica = type("DistributedDataParallel", (Replica,), {"ledger": ledger})
    return DATA_PARALLEL.replaced(DistributedDataParallel=replica)


_FAKES = {DDP: _replicas, DeepSpeed: _deepspeed, FSDP: _sharding, MeshEngine: _sharding}


class Replica(torch.nn.Module):
    """Stands in for DistributedDataParallel, which keeps a second copy of the gradients in its buckets.

    torch/csrc/distributed/c10d/reducer.cpp: a bucket is a flat tensor of its gradients' size and dtype, allocated when
    the model is wrapped. gradient_as_bucket_view, which shares the memory, is off by default.
    """

    ledger = None

    def __init__(self, module: torch.nn.Module, **kwargs):
        super().__init__()
        self.module = module
        total = sum(weight.numel() * weight.element_size() for weight in module.parameters())
        torch.empty(min(total, _SYNC_BUFFER), dtype=torch.uint8)  # allocated, and free again
        layers = {
            id(weight): part.place_in_model[1]
            for part in module.modules()
            if hasattr(part, "place_in_model")
            for weight in part.parameters()
        }
        self.buckets = []
        for weight in module.parameters():
            if weight.requires_grad and not kwargs.get("gradient_as_bucket_view"):
                self.buckets.append(torch.empty(weight.numel(), dtype=weight.dtype))
                self.ledger.classify(self.buckets[-1], "communication")
                if id(weight) in layers:
                    self.ledger.tag(self.buckets[-1], layers[id(weight)])

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


_SHARDED = Part.MESH.relies_on(
    "transformers:PreTrainedModel.maybe_distribute_model(model, distributed_config, mesh_manager)",
    "transformers.distributed.utils:TransformersDeviceMesh(dense_mesh, expert_mesh)",
    why="shards a model as from_pretrained does with a DistributedConfig",
    until="from_config takes a DistributedConfig",
)
_DEFERRED = Part.MESH.relies_on(
    "transformers:Trainer._defer_fsdp_gradient_reduction(self)",
    why="keeps whole gradients of all micro-batches; levers.apply reduces each micro-batch's",
    until="transformers has a setting for it",
)


def spread(model, mesh: Mesh, bf16: bool):
    """Shard a model as from_pretrained does with a DistributedConfig.

    Args:
        model: with weights on the meta device.
        bf16: compute in bf16 (fsdp_mixed_precision).
    """
    check(Part.MESH)
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    config = DistributedConfig(**asdict(mesh), fsdp_mixed_precision=bf16)
    with _disable_current_modes():
        dense = init_device_mesh(
            "cpu",
            (1, mesh.dp_replicate_size, mesh.fsdp_size, mesh.tp_size),
            mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp"),
        )
        expert = init_device_mesh(
            "cpu",
            (1, mesh.dp_replicate_size, config.efsdp_size, 1),
            mesh_dim_names=("pp", "dp_replicate", "efsdp", "ep"),
        )
    return model.maybe_distribute_model(model, config, TransformersDeviceMesh(dense, expert))


class KernelAdam(torch.optim.AdamW):
    """Stands in for DeepSpeedCPUAdam and FusedAdam, whose C++ reads bytes: no temporaries."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def fully_shard_model(
    model: torch.nn.Module,
    layers: list[torch.nn.Module],
    optimizer,
    mesh,
    bf16,
    fp16,
    reshards: bool = True,
    offloads: bool = False,
) -> None:
    """Shard a model as accelerate does under FSDP2: layers, embedding, norm with head, then the rest.

    Repeats accelerate.utils.fsdp_utils.fsdp2_prepare_model (1.15), which runs on accelerators only; it can go when
    that runs on the CPU.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    compute = torch.bfloat16 if bf16 else torch.float16 if fp16 else None
    ignored = {weight for weight in model.parameters() if not weight.is_floating_point()}
    if compute and not ignored:
        for weight in model.parameters():
            if weight.requires_grad and weight.dtype is not torch.float32:
                weight.data = weight.data.float()
    settings = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(compute, compute, compute),
        "ignored_params": ignored,
        "offload_policy": CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
    }
    names = {id(weight): name for name, weight in model.named_parameters()}
    groups = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshards, **settings)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if not tied:
        fully_shard(embedding, reshard_after_forward=reshards, **settings)
    tail = [module for module in ([embedding, head] if tied else [head]) if module is not None]
    if tail:
        fully_shard(tail, reshard_after_forward=False, **settings)
    fully_shard(model, **settings)
    sharded = dict(model.named_parameters())
    for group, group_names in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [sharded[name] for name in group_names]
