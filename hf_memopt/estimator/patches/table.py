"""Every name of another library that a trace replaces or relies on although the library does not promise to keep it.

A release that renames one of them must end in a sentence, not in a wrong number: `replacement.check` compares the rows
with what is installed before the first trace that needs them, and `hf-memopt doctor` compares all of them.
"""

from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What of a traced job needs a row."""

    EVERY_JOB = "every job"
    ACCELERATOR = "an accelerator's job"
    SEVERAL_DEVICES = "several devices"
    DDP = "ddp"
    FSDP2 = "fsdp2 and sharding by transformers"
    DEEPSPEED = "deepspeed"
    BITSANDBYTES = "4-bit weights and 8-bit optimizers"
    PEFT = "adapters of peft"
    FP8 = "FP8 weights"
    OPTIMIZERS = "optimizers by formula"
    FLASH_ATTENTION = "flash attention"
    LIGER = "Liger's kernels"
    VISION = "vision towers"
    DETECTION = "detection and segmentation"
    ROLLOUTS = "TRL's trainers that generate"
    LEVERS = "memory features"
    OFFLOADED_INPUTS = "checkpointed layers whose inputs are in host memory"
    TRL = "TRL's trainers"
    DRY_RUN = "dry-run"
    WITHOUT_DEEPSPEED = "no deepspeed"


class Use(Enum):
    """How a trace uses a name."""

    REPLACED = "replaced"
    CALLED = "called or read"
    INSTANCE = "set by the class on its instances"


@dataclass(frozen=True, kw_only=True)
class Names:
    """Names that are used for one reason.

    Attributes:
        owner: `module`, or `module:Class`.
        names: name -> the parameters that are relied on, as `inspect.signature` orders them; None for values and for
            functions written in C, which have no signature.
        why: what the trace needs from them.
        until: when the row can go.
    """

    owner: str
    names: dict[str, str | None]
    why: str
    until: str
    use: Use = Use.REPLACED

    def paths(self) -> dict[str, str | None]:
        """Path -> parameters."""
        return {path_to(self.owner, name): parameters for name, parameters in self.names.items()}


def path_to(owner: str, name: str) -> str:
    """`module:name` or `module:Class.name`."""
    return f"{owner}.{name}" if ":" in owner else f"{owner}:{name}"


_EVERY_JOB = (
    Names(
        owner="torch.nn:Module",
        names={"to": "self"},
        why="moving a module swaps its parameters, which fake tensors refuse: only the cast is done, in place",
        until="Module.to works on fake tensors",
    ),
    Names(
        owner="transformers.utils.import_utils",
        names={"is_fake_tensor": "x"},
        why="transformers takes a fake tensor for an export and then builds every attention mask in full",
        until="transformers asks torch.compiler.is_exporting() instead",
    ),
    Names(
        owner="torch",
        names={"tensor": None},
        why="reads the bytes of the tensors in a list; fake ones have none, but may have a known value",
        until="torch.tensor takes fake tensors with a constant",
    ),
    Names(
        owner="torch._subclasses.fake_tensor:FakeTensor",
        names={"tolist": "self"},
        why="asks element by element; known values are read at once",
        until="never: torch knows nothing of known values",
    ),
    Names(
        owner="torch._subclasses.fake_tensor:FakeTensor",
        names={"__deepcopy__": "self, memo"},
        why="torch 2.13 writes into the storage of a fake tensor's constant and corrupts the heap",
        until="deepcopy of FakeTensor(constant=…) works",
    ),
    Names(
        owner="torch",
        names={"compile": "model"},
        why="nothing compiles on fake tensors; torchao's optimizer step is booked as its compiled form",
        until="never: a trace does not compile",
    ),
    Names(
        owner="torch._subclasses.fake_tensor",
        names={"unset_fake_temporarily": ""},
        why="operators on known values run for real",
        until="never",
        use=Use.CALLED,
    ),
    Names(
        owner="torch._C",
        names={
            "_DisableTorchDispatch": None,
            "_PreserveDispatchKeyGuard": None,
            "_get_dispatch_mode": None,
            "_set_meta_in_tls_dispatch_include": None,
            "_set_warn_deprecated_on_mutable_data_ptr": None,
        },
        why="accounting.fake_outputs makes fake tensors as FakeTensorMode does, without its slow cache and checks",
        until="a look-up in FakeTensorMode's cache takes no longer than the operator",
        use=Use.CALLED,
    ),
    Names(
        owner="torch.utils._python_dispatch",
        names={"_disable_current_modes": ""},
        why="device meshes and 4-bit code tables need real values within a trace",
        until="torch has a public name for it",
        use=Use.CALLED,
    ),
    Names(
        owner="transformers.integrations.deepspeed",
        names={"_hf_deepspeed_config_weak_ref": None},
        why="a traced model must not become part of a real ZeRO-3 job of this process",
        until="transformers can build a model outside ZeRO-3",
    ),
    *(
        Names(
            owner=f"accelerate.state:{kind}",
            names={"_shared_state": None},
            why="accelerate keeps one state a process; a real job may be using it, so it is put back",
            until="an Accelerator can have a state of its own",
            use=Use.CALLED,
        )
        for kind in ("PartialState", "AcceleratorState", "GradientState")
    ),
    Names(
        owner="transformers:Trainer",
        names={"_get_train_sampler": "self", "create_accelerator_and_postprocess": "self"},
        why="the traced Trainer reads fake rows in order, and a copy of the user's gets an accelerator of its own",
        until="Trainer has public hooks for both",
        use=Use.CALLED,
    ),
    Names(
        owner="transformers.models.auto.auto_factory:_BaseAutoModelClass",
        names={"_model_mapping": None},
        why="says which tasks a configuration has a model for",
        until="transformers has a public name for it",
        use=Use.CALLED,
    ),
)

_ACCELERATOR = (
    Names(
        owner="torch",
        names={"is_autocast_enabled": None},
        why="without a device it asks for CUDA's autocast, which is the CPU's here",
        until="fake CUDA tensors run on builds without CUDA",
    ),
    Names(
        owner="torch.library",
        names={"_scoped_library": "args, kwargs"},
        why="kernels that are registered for a trace end with it",
        until="torch has a public name for it",
        use=Use.CALLED,
    ),
)

_C10D = "torch.distributed.distributed_c10d"
_SEVERAL_DEVICES = (
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

_DDP = (
    Names(
        owner="torch.nn.parallel",
        names={"DistributedDataParallel": "module, device_ids, output_device"},
        why="its reducer is C++ that reads gradients' bytes; under FSDP2 accelerate wraps with it on the CPU",
        until="the reducer runs on fake tensors, and accelerate starts FSDP2 on the CPU",
    ),
)

_SHARD = "torch.distributed.fsdp._fully_shard"
_FSDP2 = (
    Names(
        owner=f"{_SHARD}._fsdp_param",
        names={"alloc_storage": "tensor", "free_storage": "tensor"},
        why="gathered weights are freed by resizing their storage, which no dispatch mode sees",
        until="UntypedStorage.resize_ can be observed",
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
_DEEPSPEED = (
    Names(
        owner="deepspeed.accelerator.real_accelerator",
        names={"ds_accelerator": None},
        why="a trace runs on CPU tensors, whatever accelerator DeepSpeed found",
        until="fake CUDA tensors run on builds without CUDA",
    ),
    Names(
        owner="deepspeed.comm.comm",
        names={"cdb": None},
        why="DeepSpeed's one communication backend a process; the trace has one over the fake group",
        until="deepspeed.comm can hold two backends",
    ),
    Names(
        owner="deepspeed.comm.torch",
        names={"build_shm_op": ""},
        why="would compile kernels that read shared memory of ranks that do not exist",
        until="DeepSpeed builds them for its own backend only",
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
        owner=f"{_ZERO}.utils",
        names={"ZERO_SUPPORTED_OPTIMIZERS": None},
        why="the stand-in for these optimizers is not in the list",
        until="they need none",
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
        owner="torch.nn.functional",
        names={"linear": None},
        why="ZeRO-3 replaces torch's linear and leaves its own there",
        until="DeepSpeed restores it",
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

_BITSANDBYTES = (
    Names(
        owner="bitsandbytes.nn.modules",
        names={"fix_4bit_weight_quant_state_from_module": "module"},
        why="wraps a weight that FSDP gathered in Params4bit, which cannot hold a fake tensor",
        until="Params4bit holds fake tensors",
    ),
    Names(
        owner="bitsandbytes",
        names={"matmul": "A, B, out, state, threshold, bias"},
        why="8-bit training runs another function on a CPU than on CUDA, whose jobs are traced on the CPU",
        until="fake CUDA tensors run in builds of torch without CUDA",
    ),
    Names(
        owner="bitsandbytes.optim:AdEMAMix",
        names={"_get_state_double_buffer": "self, p, dtype"},
        why="pages AdEMAMix's states even on the CPU (0.50), where a fake one cannot be paged",
        until="never: a trace has no managed memory",
    ),
    Names(
        owner="bitsandbytes.optim.optimizer:Optimizer8bit",
        names={"get_state_buffer": "self, p, dtype"},
        why="paged states are in CUDA managed memory, which torch's allocator does not count",
        until="never: a trace has no managed memory",
    ),
    Names(
        owner="bitsandbytes.functional",
        names={"name2qmap": None},
        why="the code table that quantization keeps there is made of real values",
        until="Params4bit holds fake tensors",
        use=Use.CALLED,
    ),
    Names(
        owner="transformers.quantizers.base:HfQuantizer",
        names={"_process_model_before_weight_loading": "self, model"},
        why="replaces linear layers as from_pretrained does",
        until="from_config takes a quantization_config",
        use=Use.CALLED,
    ),
    Names(
        owner="bitsandbytes.backends.default.ops",
        names={"_gemm_4bit_default_impl": "A, B"},
        why="its temporaries, which the fake kernel does not show",
        until="the fake kernel allocates them",
        use=Use.CALLED,
    ),
    Names(
        owner="bitsandbytes.backends.cpu.ops",
        names=dict.fromkeys(
            ("_optimizer_update_8bit_blockwise_cpu", "_optimizer_update_32bit_cpu"), "optimizer_name, g, p, state1"
        ),
        why="their temporaries, which the fake kernels do not show",
        until="the fake kernels allocate them",
        use=Use.CALLED,
    ),
)

_OPTIMIZERS = (
    Names(
        owner="transformers.trainer_optimizer",
        names={"_OPTIMIZER_HANDLERS": None, "is_torchao_available": None},
        why="creates torchao's optimizers where it is not installed: they are counted by formula",
        until="never: a trace needs no torchao",
    ),
)

_FLASH_ATTENTION = (
    Names(
        owner="transformers.modeling_flash_attention_utils",
        names={
            "lazy_import_flash_attention": "implementation, attention_wrapper, allow_all_kernels",
            "FLASH_ATTENTION_COMPATIBILITY_MATRIX": None,
        },
        why="finds the installed kernels and takes the hub's for missing ones; a trace needs none of them",
        until="transformers loads a model with attention that is not installed",
    ),
    Names(
        owner="transformers:PreTrainedModel",
        names={"_flash_attn_can_dispatch": "self, flash_attn_version, is_init_check"},
        why="asks for the package and for a GPU of this machine",
        until="transformers loads a model with attention that is not installed",
    ),
    Names(
        owner="transformers.modeling_flash_attention_utils",
        names={
            "_get_unpad_data": "attention_mask",
            "_is_packed_sequence": "position_ids, batch_size",
            "prepare_fa_kwargs_from_position_ids": "position_ids",
        },
        why="read the values of masks and positions to find where sequences end",
        until="never",
    ),
    Names(
        owner="transformers.modeling_flash_attention_utils",
        names={
            "_pad_input": "hidden_states, indices, batch, seqlen",
            "_unpad_input": "hidden_states, attention_mask",
            "_flash_attention_forward": "query_states, key_states, value_states",
        },
        why="what transformers does around the kernel runs as it is",
        until="never",
        use=Use.CALLED,
    ),
)

_LIGER = (
    Names(
        owner="transformers.trainer",
        names={"apply_liger_kernel": "model, kernel_config"},
        why="Liger's kernels are Triton, which has no fake tensors",
        until="never",
    ),
    Names(
        owner="transformers.models.llama.modeling_llama",
        names={"apply_rotary_pos_emb": "q, k, cos, sin"},
        why="every model's module has its own copy, in whose place Liger puts one that rotates in place",
        until="never",
    ),
)

_DETECTION = (
    Names(
        owner="scipy.optimize",
        names={"linear_sum_assignment": None},
        why="losses match predictions with targets by the values of their costs",
        until="never",
    ),
)

_VISION = (
    Names(
        owner="transformers.vision_utils",
        names={
            "get_vision_attention_seqlens": "grid_thw, config",
            "get_vision_window_index": "grid_thw, spatial_merge_size, window_size, patch_size",
        },
        why="a vision tower makes a call to attention for every window: thousands, traced as a few larger ones",
        until="transformers attends to all windows in one call without flash attention",
    ),
)

_OFFLOADED_INPUTS = (
    Names(
        owner="transformers.modeling_utils",
        names={"save_on_cpu": "pin_memory, device_type"},
        why="in a trace all is on the CPU: what it moves there is counted as host memory",
        until="fake CUDA tensors run on builds without CUDA",
    ),
)

_LEVERS = (
    Names(
        owner="transformers:PreTrainedModel",
        names={"loss_function": None, "_supports_flex_attn": None, "_supports_sdpa": None},
        why="loss_chunk_size replaces a model's loss; patterns need both kernels",
        until="never",
        use=Use.CALLED,
    ),
    Names(
        owner="torch._functorch.config",
        names={"activation_memory_budget": None},
        why="compile_memory_budget sets it while training runs",
        until="torch.compile takes it as an option",
        use=Use.CALLED,
    ),
)

_DRY_RUN = (
    Names(
        owner="transformers:PreTrainedModel",
        names={"from_pretrained": "pretrained_model_name_or_path", "_from_config": "config"},
        why="a script's models are made of fake tensors, without its weights",
        until="never",
    ),
    Names(
        owner="transformers.modeling_utils:PreTrainedModel",
        names={
            "_load_pretrained_model": "model, state_dict, checkpoint_files, load_config, expected_keys",
            "_finalize_model_loading": "model, load_config, loading_info",
        },
        why="from_pretrained runs up to its weights, which become fake tensors",
        until="never",
    ),
    Names(
        owner="transformers.modeling_utils",
        names={
            "_get_resolved_checkpoint_files": None,
            "_get_dtype": "dtype, checkpoint_files, config",
            "get_hf_quantizer": "config, quantization_config, device_map",
        },
        why="a checkpoint's headers say its dtype if they are here; a quantizer would check for its kernels",
        until="never",
    ),
    Names(
        owner="transformers:PreTrainedModel",
        names={
            "save_pretrained": "self, save_directory",
            "push_to_hub": "self",
            "resize_token_embeddings": "self, new_num_tokens, pad_to_multiple_of, mean_resizing",
        },
        why="fake weights are not saved, and have no mean that new embeddings could begin with",
        until="never",
    ),
    Names(
        owner="transformers.utils.hub",
        names={"cached_files": "path_or_repo_id, filenames"},
        why="libraries that read without Python need the real path of what a script wrote",
        until="never",
    ),
    Names(
        owner="peft.utils.save_and_load",
        names={"load_peft_weights": "model_id, device", "set_peft_model_state_dict": "model, peft_model_state_dict"},
        why="an adapter's weights are not read",
        until="never",
    ),
    Names(
        owner="transformers:Trainer",
        names={"train": "self", "evaluate": "self", "init_hf_repo": "self"},
        why="the script stops where it would train",
        until="never",
    ),
)

_FP8 = (
    Names(
        owner="transformers.integrations.finegrained_fp8",
        names={"load_finegrained_fp8_kernel": ""},
        why="the kernels come from the hub and run on cards alone",
        until="never",
    ),
)

_WITHOUT_DEEPSPEED = (
    Names(
        owner="accelerate.utils.other",
        names={"is_deepspeed_available": ""},
        why="accelerate imports DeepSpeed, which takes a second, to ask whether a model is its engine",
        until="accelerate looks into sys.modules first",
    ),
)

_PEFT = (
    Names(
        owner="peft.tuners.boft.layer",
        names={"torch": None},
        why="block_diag of thousands of blocks takes minutes on fake tensors (0.21)",
        until="torch's fake kernel takes them at once",
    ),
    Names(
        owner="peft.tuners.boft.layer:BOFTLayer",
        names={"block_butterfly_perm": "self, n, b, r", "perm2mat": "self, indices"},
        why="permutations are made of values",
        until="peft makes them by indexing",
    ),
    Names(
        owner="peft.tuners.shira.layer:ShiraLayer",
        names={"update_layer": "self, adapter_name, mask, r"},
        why="asks a mask for the places of its ones, whose number is known",
        until="peft passes indices",
    ),
    Names(
        owner="peft.tuners.shira.layer:Linear",
        names={"get_delta_weight": "self, adapter"},
        why="a sparse tensor has no storage that a fake one could stand for",
        until="the ledger counts sparse tensors",
    ),
    Names(
        owner="peft.tuners.unilora.model:UniLoraModel",
        names={"_assign_unilora_indices_and_scales": "self, adapter_name"},
        why="counts indices with bincount",
        until="fake tensors have values that shapes decide",
    ),
    Names(
        owner="peft.tuners.frod.model:FrodModel",
        names={"_init_frod_projections": "self, config, adapter_name"},
        why="decomposes the weights' values",
        until="never",
    ),
    Names(
        owner="peft.tuners.frod.layer:FrodLayer",
        names={"_calculate_frod_u_and_lambda": "self, V, W"},
        why="decomposes the weights' values",
        until="never",
    ),
    Names(
        owner="peft.tuners.frod.layer:Linear",
        names={"_get_frod_tensors": "self, adapter", "_sparse_activation_mm": "self, z_flat, S_sparse"},
        why="a sparse tensor has no storage that a fake one could stand for",
        until="the ledger counts sparse tensors",
    ),
)

_ROLLOUTS = (
    Names(
        owner="accelerate.utils",
        names={"gather_object": "object"},
        why="pickles tensors to gather texts and the names of metrics, of which no other process has any",
        until="torch's fake process group gathers objects",
    ),
    Names(
        owner="trl.generation.vllm_generation:VLLMGeneration",
        names={"_init_vllm": "self"},
        why="starts an engine, whose memory is counted by arithmetic",
        until="never",
    ),
    Names(
        owner="trl.trainer.utils",
        names={"create_model_from_path": "model_id"},
        why="loads the reference model by the name of the policy",
        until="TRL's trainers that generate take a reference model",
    ),
)

_TRL = (
    Names(
        owner="trl.kernels.chunked_logprob",
        names={
            "_forward_tile": "tile, tile_stride, targets",
            "_backward_tile": "tile, tile_stride, targets",
            "_addmm_fp32": "acc, a, b",
        },
        why="Triton's kernels allocate nothing, where their forms for CPUs copy each tile of logits",
        until="never",
    ),
    Names(
        owner="trl.trainer.utils",
        names={"_use_triton": "device"},
        why="with Triton the head scores the tokens of completions alone",
        until="never",
    ),
    *(
        Names(
            owner=f"trl.trainer.{name}_trainer",
            names={"hash_module": "module"},
            why="the cache of precomputed log-probabilities is named after the weights' values",
            until="never",
        )
        for name in ("dpo", "kto")
    ),
    *(
        Names(
            owner=f"trl.trainer.{name.lower()}_trainer:{name}Trainer",
            names={"_precompute_ref_logps": "self, dataset, name, batch_size"},
            why="runs the reference model when the trainer is made, for values",
            until="never",
        )
        for name in ("DPO", "KTO")
    ),
)

TABLE: dict[Part, tuple[Names, ...]] = {
    Part.EVERY_JOB: _EVERY_JOB,
    Part.ACCELERATOR: _ACCELERATOR,
    Part.SEVERAL_DEVICES: _SEVERAL_DEVICES,
    Part.DDP: _DDP,
    Part.FSDP2: _FSDP2,
    Part.DEEPSPEED: _DEEPSPEED,
    Part.BITSANDBYTES: _BITSANDBYTES,
    Part.OPTIMIZERS: _OPTIMIZERS,
    Part.FP8: _FP8,
    Part.PEFT: _PEFT,
    Part.FLASH_ATTENTION: _FLASH_ATTENTION,
    Part.LIGER: _LIGER,
    Part.VISION: _VISION,
    Part.DETECTION: _DETECTION,
    Part.ROLLOUTS: _ROLLOUTS,
    Part.LEVERS: _LEVERS,
    Part.OFFLOADED_INPUTS: _OFFLOADED_INPUTS,
    Part.TRL: _TRL,
    Part.DRY_RUN: _DRY_RUN,
    Part.WITHOUT_DEEPSPEED: _WITHOUT_DEEPSPEED,
}
