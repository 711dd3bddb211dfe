"""A context in which this process is one rank of a job of any size, alone.

The engines are the real ones: DeepSpeed's ZeRO and torch's fully_shard run their own code on fake tensors, over a
process group whose collectives do nothing. Only torch's DistributedDataParallel, whose reducer is C++ that wants
bytes, has a stand-in here.
"""

import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from unittest import mock

import torch
from torch import distributed
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.compatibility.mesh import Mesh
from hf_memopt.estimator.patches import fake_disk

ENGINES = ("none", "ddp", "fsdp2", "mesh", "deepspeed")
_NUMBERS = itertools.count(-1, -1)
_SYNC_BUFFER = 250 * 2**20  # bytes; torch broadcasts a model's start in pieces of this size (DistributedDataParallel)
# What a launcher leaves in the environment; the traced job must not see it.
_LAUNCHED = ("ACCELERATE_", "FSDP_", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_")


@contextmanager
def fake_cluster(world_size: int, engine: str, ledger, rank: int = 0) -> Iterator[None]:
    """Be one of `world_size` processes.

    Args:
        engine: none, ddp, fsdp2, mesh or deepspeed.
        ledger: is told of memory that FSDP gives back without freeing the tensor.
        rank: which one.
    """
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_LAUNCHED)}
    # The traced Trainer never spreads over the GPUs that a notebook would have DataParallel use.
    with mock.patch.dict(os.environ, environment, clear=True):
        if engine == "none":
            yield
            return
        ranks = {"WORLD_SIZE": world_size, "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({key: str(value) for key, value in ranks.items()})
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29500")
        os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # or accelerate changes it
        with _process_group(world_size, rank), ExitStack() as patches:
            if engine == "deepspeed":
                os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
                patches.enter_context(_deepspeed(ledger))
            elif engine in ("fsdp2", "mesh"):
                patches.enter_context(following_fsdp(ledger))
                patches.enter_context(_meshes())
            else:
                replica = type("Replica", (Replica,), {"ledger": ledger})
                patches.enter_context(mock.patch.object(torch.nn.parallel, "DistributedDataParallel", replica))
            yield


@contextmanager
def _process_group(world_size: int, rank: int) -> Iterator[None]:
    """A process group of which only this process exists, beside the real one if there is one."""
    from torch.distributed import distributed_c10d as c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(c10d, "_world", c10d._World()))
        patches.enter_context(mock.patch.object(c10d, "_group_count", 1_000_000))
        for name, value in vars(c10d).copy().items():  # what is known of real groups, which destroying would clear
            if name.startswith(("_pg_", "_tags_to_pg")) and isinstance(value, dict):
                patches.enter_context(mock.patch.object(c10d, name, type(value)()))
        # By these names operators find real groups; destroying this one would forget them all.
        patches.enter_context(mock.patch.object(c10d, "_unregister_all_process_groups", lambda: None))
        # init_process_group makes uncaught errors say the rank; this process's are its own.
        patches.enter_context(mock.patch.object(sys, "excepthook", sys.excepthook))
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            names = list(c10d._world.pg_names.values())
            distributed.destroy_process_group()
            for name in names:
                c10d._unregister_process_group(name)


@contextmanager
def _deepspeed(ledger) -> Iterator[None]:
    """DeepSpeed on the fake process group: CPU tensors, no shared-memory kernels, no agreement between ranks."""
    import deepspeed
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.comm import comm
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero import partition_parameters
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import groups, logger

    backend = sys.modules["deepspeed.comm.torch"]  # `deepspeed.comm.torch` as an attribute is torch itself
    adam = importlib.import_module("deepspeed.ops.adam")
    register = DeepSpeedZeRoOffload._register_deepspeed_module
    groups_before, disabled = dict(vars(groups)), logger.disabled
    logger.disabled = True
    try:
        with (
            mock.patch.object(real_accelerator, "ds_accelerator", CPU_Accelerator()),
            mock.patch.object(comm, "cdb", None),
            mock.patch.object(backend, "build_shm_op", lambda: None),
            mock.patch.object(coordinator, "assert_ints_same_as_other_ranks", lambda *_: None),
            mock.patch.object(adam, "DeepSpeedCPUAdam", HostAdam),
            mock.patch.object(AsyncIOBuilder, "load", fake_disk.loader(ledger)),
            # By these numbers real ranks know their weights and modules; one rank's must not run ahead.
            mock.patch.object(partition_parameters.Init, "param_id", 0),
            mock.patch.object(register, "__defaults__", ([0],)),
            # ZeRO-3 puts its own linear in the place of torch's and leaves it there.
            mock.patch.object(torch.nn.functional, "linear", torch.nn.functional.linear),
        ):
            deepspeed.init_distributed(dist_backend="fake", verbose=False)
            yield
    finally:
        logger.disabled = disabled
        vars(groups).update(groups_before)


@contextmanager
def following_fsdp(ledger) -> Iterator[None]:
    """Three things of FSDP that the ledger would not see: gathered weights are freed by resizing their storage;
    DTensor finds out the shape of a result by computing it once on fake tensors of the whole size; gradients come to
    a shard without autograd's hooks."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def told(resize):
        def resize_and_tell(tensor):
            resize(tensor)
            ledger.resized(tensor)

        return resize_and_tell

    def unbooked(find_shape):
        def find_shape_unbooked(*args, **kwargs):
            ledger.paused, before = True, ledger.paused
            try:
                return find_shape(*args, **kwargs)
            finally:
                ledger.paused = before

        return find_shape_unbooked

    with ExitStack() as patches:
        for module in (_fsdp_param, _fsdp_param_group):
            for name in {"alloc_storage", "free_storage"} & set(vars(module)):
                patches.enter_context(mock.patch.object(module, name, told(getattr(module, name))))
        reduce = _fsdp_param_group.FSDPParamGroup.post_backward

        def reduce_and_tell(group, *args, **kwargs):
            reduce(group, *args, **kwargs)
            for weight in group.fsdp_params:
                if weight.sharded_param.grad is not None:
                    ledger.classify(weight.sharded_param.grad, "gradients")
            where, layer = getattr(group.modules[0], "place_in_model", ("the rest", None))
            ledger.enter(f"{ledger.phase}: gradients of {where}", layer=layer)

        patches.enter_context(mock.patch.object(_fsdp_param_group.FSDPParamGroup, "post_backward", reduce_and_tell))
        name = "_propagate_tensor_meta_non_cached"
        find_shape = unbooked(getattr(ShardingPropagator, name))
        patches.enter_context(mock.patch.object(ShardingPropagator, name, find_shape))
        yield


@contextmanager
def _meshes() -> Iterator[None]:
    """Meshes lay out ranks where tensors are fake, of which they need values; accelerate wants an accelerator for
    them."""
    from accelerate import ParallelismConfig
    from torch.distributed.device_mesh import DeviceMesh

    build, init = ParallelismConfig.build_device_mesh, DeviceMesh.__init__
    own = next(_NUMBERS)  # DTensor remembers what it did on a mesh, and an earlier trace's groups are gone

    def build_with_values(config, device_type):
        with _disable_current_modes():
            return build(config, device_type)

    def init_with_values(mesh, *args, **kwargs):
        with _disable_current_modes():
            init(mesh, *args, **kwargs)
        mesh._thread_id = own

    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(ParallelismConfig, "build_device_mesh", build_with_values))
        patches.enter_context(mock.patch.object(DeviceMesh, "__init__", init_with_values))
        patches.enter_context(mock.patch.object(ParallelismConfig, "_validate_accelerator", lambda *_: None))
        yield


class Replica(torch.nn.Module):
    """Stands for DistributedDataParallel: beside the gradients it keeps their copies, in buckets of its own.

    (torch/csrc/distributed/c10d/reducer.cpp: every bucket is a flat tensor of its gradients' size and type, made when
    the model is wrapped; gradient_as_bucket_view, which would share them, is off by default.)
    """

    ledger = None

    def __init__(self, module: torch.nn.Module, **kwargs):
        super().__init__()
        self.module = module
        total = sum(weight.numel() * weight.element_size() for weight in module.parameters())
        start = torch.empty(min(total, _SYNC_BUFFER), dtype=torch.uint8)
        del start
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


def spread(model, mesh: Mesh, bf16: bool):
    """A model cut up as from_pretrained does with a DistributedConfig, which begins with weights on the meta
    device."""
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


class HostAdam(torch.optim.AdamW):
    """Stands for DeepSpeedCPUAdam, whose C++ wants bytes: fp32 states on the host and no temporaries."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, **_):
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def fully_shard_model(model: torch.nn.Module, layers: list[torch.nn.Module], optimizer, mesh, bf16, fp16) -> None:
    """Shard a model as accelerate does under FSDP2: layers, embedding, norm with head, then the rest.

    (accelerate.utils.fsdp_utils.fsdp2_prepare_model; it starts on accelerators only, so its steps are repeated here.)
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    compute = torch.bfloat16 if bf16 else torch.float16 if fp16 else None
    packed = {weight for weight in model.parameters() if not weight.is_floating_point()}
    if compute and not packed:
        for weight in model.parameters():
            if weight.requires_grad and weight.dtype is not torch.float32:
                weight.data = weight.data.float()
    settings = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(compute, compute, compute), "ignored_params": packed}
    names = {id(weight): name for name, weight in model.named_parameters()}
    kept = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]
    for layer in layers:
        fully_shard(layer, **settings)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    if not tied:
        fully_shard(embedding, **settings)
    tail = [module for module in ([embedding, head] if tied else [head]) if module is not None]
    if tail:
        fully_shard(tail, reshard_after_forward=False, **settings)
    fully_shard(model, **settings)
    sharded = dict(model.named_parameters())
    for group, group_names in zip(optimizer.param_groups, kept, strict=True):
        group["params"] = [sharded[name] for name in group_names]
