"""Names that models need, by what is special about them: attention, adapters, quantization, vision."""

from hf_memopt.estimator.patches.names import Names, Use

FLASH_ATTENTION = (
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

LIGER = (
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

VISION = (
    Names(
        owner="transformers.vision_utils",
        names={
            "get_vision_attention_seqlens": "grid_thw, config",
            "get_vision_window_index": "grid_thw, spatial_merge_size, window_size, patch_size",
        },
        why="a vision tower makes a call to attention for every window: thousands, traced as a few larger ones",
        until="transformers attends to all windows in one call without flash attention",
        since="5.15",  # before, each model has its own
    ),
)

DETECTION = (
    Names(
        owner="scipy.optimize",
        names={"linear_sum_assignment": None},
        why="losses match predictions with targets by the values of their costs",
        until="never",
    ),
)

FP8 = (
    Names(
        owner="transformers.integrations.finegrained_fp8",
        names={"load_finegrained_fp8_kernel": ""},
        why="the kernels come from the hub and run on cards alone",
        until="never",
    ),
)

PEFT = (
    Names(
        owner="peft.tuners.boft.layer",
        names={"torch": None},
        why="block_diag of thousands of blocks takes minutes on fake tensors (0.21)",
        until="torch's fake kernel takes them at once",
    ),
    Names(
        owner="peft.tuners.boft.layer:BOFTLayer",
        names={"perm2mat": "self, indices"},
        why="writes a permutation element by element, which takes seconds on fake tensors (0.21)",
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
        since="0.20",
        names={"_assign_unilora_indices_and_scales": "self, adapter_name"},
        why="counts indices with bincount",
        until="fake tensors have values that shapes decide",
    ),
    Names(
        owner="peft.tuners.frod.model:FrodModel",
        since="0.20",
        names={"_init_frod_projections": "self, config, adapter_name"},
        why="decomposes the weights' values",
        until="never",
    ),
    Names(
        owner="peft.tuners.frod.layer:FrodLayer",
        since="0.20",
        names={"_calculate_frod_u_and_lambda": "self, V, W"},
        why="decomposes the weights' values",
        until="never",
    ),
    Names(
        owner="peft.tuners.frod.layer:Linear",
        since="0.20",
        names={"_get_frod_tensors": "self, adapter", "_sparse_activation_mm": "self, z_flat, S_sparse"},
        why="a sparse tensor has no storage that a fake one could stand for",
        until="the ledger counts sparse tensors",
    ),
)

OFFLOADED_INPUTS = (
    Names(
        owner="transformers.modeling_utils",
        names={"save_on_cpu": "pin_memory, device_type"},
        why="in a trace all is on the CPU: what it moves there is counted as host memory",
        until="fake CUDA tensors run on builds without CUDA",
    ),
)

LEVERS = (
    Names(
        owner="transformers:PreTrainedModel",
        names={"_supports_flex_attn": None, "_supports_sdpa": None},
        why="attention patterns need both kernels",
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

BITSANDBYTES = (
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
        since="0.50",
        why="its temporaries, which the fake kernel does not show",
        until="the fake kernel allocates them",
        use=Use.CALLED,
    ),
    Names(
        owner="bitsandbytes.backends.cpu.ops",
        names=dict.fromkeys(
            ("_optimizer_update_8bit_blockwise_cpu", "_optimizer_update_32bit_cpu"), "optimizer_name, g, p, state1"
        ),
        since="0.50",
        why="their temporaries, which the fake kernels do not show",
        until="the fake kernels allocate them",
        use=Use.CALLED,
    ),
)
