"""Names that jobs on several devices need: of torch's process groups and FSDP2, and of DeepSpeed."""

from hf_memopt.estimator.patches.names import Names, Use

_C10D = "torch.distributed.distributed_c10d"

SEVERAL_DEVICES = (
    Names(
        owner=_C10D,
        names={"_world": None},
        why="the fake process group must not meet, rename or destroy the real ones of this process",
        until="c10d can hold two worlds",
    ),
    Names(
        owner=_C10D,
        names={"_unregister_all_process_groups": None},
        why="destroying the fake group would forget the names of the real ones",
        until="c10d can hold two worlds",
    ),
    Names(
        owner=_C10D,
        names={"_World": None, "_unregister_process_group": None},
        why="the fake groups are forgotten one by one",
        until="c10d can hold two worlds",
        use=Use.CALLED,
    ),
    Names(
        owner="torch.testing._internal.distributed.fake_pg",
        names={"FakeStore": None},
        why="lets one process be rank r of N; importing the module registers the backend `fake`",
        until="never",
        use=Use.CALLED,
    ),
)

LAUNCH = (
    Names(
        owner="accelerate.commands.launch",
        names={"subprocess": None},
        why="a script of one process is started by Popen, whose environment is what a dry run needs",
        until="accelerate tells the environment of a launch without starting it",
    ),
    Names(
        owner="torch.distributed.run",
        names={"run": "args"},
        why="starts a script's processes, in the environment that a dry run needs",
        until="accelerate tells the environment of a launch without starting it",
    ),
    Names(
        owner="accelerate.utils.launch",
        names={"is_port_in_use": "port"},
        why="opens a socket, which a confined process cannot",
        until="accelerate tells the environment of a launch without starting it",
    ),
)

DDP = (
    Names(
        owner="torch.nn.parallel",
        names={"DistributedDataParallel": "module, device_ids, output_device"},
        why="its reducer is C++ that reads gradients' bytes; under FSDP2 accelerate wraps with it on the CPU",
        until="the reducer runs on fake tensors, and accelerate starts FSDP2 on the CPU",
    ),
)

_SHARD = "torch.distributed.fsdp._fully_shard"

FSDP2 = (
    Names(
        owner=f"{_SHARD}._fsdp_param",
        names={"alloc_storage": "tensor", "free_storage": "tensor"},
        why="gathered weights are freed by resizing their storage, which no dispatch mode sees",
        until="UntypedStorage.resize_ can be observed",
    ),
    Names(
        owner=f"{_SHARD}._fsdp_collectives",
        names={"_get_param_all_gather_inputs": "fsdp_params"},
        why="shards in host memory are copied to the device before they are gathered: in a trace both are one device",
        until="fully_shard has a hook before the gathering",
    ),
    Names(
        owner=f"{_SHARD}._fsdp_param_group:FSDPParamGroup",
        names={"post_backward": "self"},
        why="gradients come to a shard without autograd's hooks",
        until="fully_shard has a hook after the reduction",
    ),
    Names(
        owner="torch.distributed.tensor._sharding_prop:ShardingPropagator",
        names={"_propagate_tensor_meta_non_cached": "self, op_schema"},
        why="finds a result's shape by computing it on fake tensors of the whole size, which are no memory of the job",
        until="DTensor finds shapes on meta tensors",
    ),
    Names(
        owner="accelerate:ParallelismConfig",
        names={"build_device_mesh": "self, device_type", "_validate_accelerator": "self, accelerator"},
        why="meshes need real values, and accelerate refuses them without an accelerator (1.15)",
        until="accelerate builds meshes on the CPU",
    ),
    Names(
        owner="torch.distributed.device_mesh:DeviceMesh",
        names={"__init__": "self, device_type"},
        why="lays out ranks in a tensor whose values it reads",
        until="DeviceMesh leaves the current modes by itself",
    ),
)

_RING = "torch.distributed.tensor.experimental._context_parallel._attention"

CONTEXT_PARALLEL = (
    Names(
        owner="transformers:Trainer",
        names={"_prepare_context_parallel_inputs": "self, model, inputs"},
        why="asks accelerate to divide batches, which it does on accelerators only (1.15)",
        until="accelerate starts FSDP2 on the CPU",
    ),
    Names(
        owner=_RING,
        names={
            "_templated_ring_attention": "group, seq_dim, op, query, key, value, is_causal",
            "_templated_ring_attention_backward": "group, seq_dim, op, grad_out, grad_out_name, query, key, value, "
            "out, logsumexp, is_causal",
        },
        why="the ring itself, around any kernel",
        until="torch has a ring for the CPU's kernel",
        use=Use.CALLED,
    ),
    Names(
        owner="accelerate.big_modeling",
        names={"_attach_context_parallel_hooks": "model"},
        why="takes the masks from a model's attention, as accelerate does where it divides batches",
        until="accelerate starts FSDP2 on the CPU",
        use=Use.CALLED,
    ),
)

MESH = (
    Names(
        owner="transformers:PreTrainedModel",
        names={"maybe_distribute_model": "model, distributed_config, mesh_manager"},
        why="shards a model as from_pretrained does with a DistributedConfig",
        until="from_config takes a DistributedConfig",
        use=Use.CALLED,
    ),
    Names(
        owner="transformers.distributed.utils",
        names={"TransformersDeviceMesh": "dense_mesh, expert_mesh"},
        why="what maybe_distribute_model takes",
        until="from_config takes a DistributedConfig",
        use=Use.CALLED,
    ),
    Names(
        owner="transformers:Trainer",
        names={"_defer_fsdp_gradient_reduction": "self"},
        why="keeps whole gradients of all micro-batches; levers.sharded_gradients reduces each micro-batch's",
        until="transformers has a setting for it",
        use=Use.CALLED,
    ),
)

_ZERO = "deepspeed.runtime.zero"

DEEPSPEED = (
    Names(
        owner="deepspeed.runtime.sequence_parallel.parallel_state_sp",
        names={"_SEQUENCE_PARALLEL_GROUP": None, "_SEQUENCE_DATA_PARALLEL_GROUP": None},
        why="a process has one group of each kind, and the trace's is over the fake process group",
        until="deepspeed can hold two",
    ),
    Names(
        owner="deepspeed.runtime.sequence_parallel.ulysses_sp:UlyssesSPAttentionHF",
        names={
            "register_with_transformers": "model_name_or_path, core_attn_implementation, sequence_parallel_size, "
            "micro_batch_size"
        },
        why="accelerate calls it while it prepares a model whose batches it divides, which are traced divided",
        until="never",
        use=Use.CALLED,
    ),
    Names(
        owner="deepspeed.comm.comm",
        names={"cdb": None},
        why="DeepSpeed's one communication backend a process; the trace has one over the fake group",
        until="deepspeed.comm can hold two backends",
    ),
    Names(
        owner=f"{_ZERO}.partitioned_param_coordinator",
        names={"assert_ints_same_as_other_ranks": None},
        why="compares values with ranks that do not exist",
        until="never",
    ),
    Names(
        owner="deepspeed.ops.adam",
        names={"DeepSpeedCPUAdam": "model_params, lr", "FusedAdam": "params, lr"},
        why="their C++ reads bytes",
        until="never",
    ),
    Names(
        owner="deepspeed.ops.op_builder:AsyncIOBuilder",
        names={"load": "self"},
        why="its C++ reads and writes bytes; fake_disk.Handle takes the same buffers",
        until="never",
    ),
    Names(
        owner=f"{_ZERO}.partition_parameters:Init",
        names={"param_id": None},
        why="real ranks know their weights by this counter; one rank's trace must not advance it",
        until="the counter belongs to an engine",
    ),
    Names(
        owner=f"{_ZERO}.partition_parameters",
        names={"_orig_torch_tensor": None},
        why="zero.Init puts it in the place of torch.tensor when it ends, and the trace's own reads known values",
        until="zero.Init restores what it found",
    ),
    Names(
        owner=f"{_ZERO}.parameter_offload:DeepSpeedZeRoOffload._register_deepspeed_module",
        names={"__defaults__": None},
        why="numbers modules with a counter in its default argument `count=[0]`",
        until="the counter belongs to an engine",
    ),
    Names(
        owner=f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer",
        names=dict.fromkeys(
            (
                "averaged_gradients",
                "ipg_buckets",
                "temp_grad_buffer_for_gpu_offload",
                "temp_grad_buffer_for_cpu_offload",
                "param_buffer_of_bit16_for_cpu_offload_groups",
                "offload_gradient_dict",
            )
        ),
        why="says which of the engine's tensors are weights, states, gradients and staging buffers",
        until="never",
        use=Use.INSTANCE,
    ),
    Names(
        owner=f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3",
        names=dict.fromkeys(
            (
                "fp32_partitioned_groups_flat",
                "averaged_gradients",
                "grad_partitions_flat_buffer",
                "ipg_buckets",
                "optimizer_swapper",
            )
        ),
        why="says which of the engine's tensors are weights, states, gradients and buffers of communication",
        until="never",
        use=Use.INSTANCE,
    ),
)

WITHOUT_DEEPSPEED = (
    Names(
        owner="accelerate.utils.other",
        names={"is_deepspeed_available": ""},
        why="accelerate imports DeepSpeed, which takes a second, to ask whether a model is its engine",
        until="accelerate looks into sys.modules first",
    ),
)
