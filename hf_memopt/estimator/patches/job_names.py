"""Names that a traced Trainer needs, whatever its model: every job's, and those of optimizers, TRL and dry-run."""

from hf_memopt.estimator.patches.names import Names, Use

EVERY_JOB = (
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
        names={"create_accelerator_and_postprocess": "self"},
        why="a copy of the user's Trainer gets an accelerator of its own",
        until="Trainer has a public hook for it",
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

ACCELERATOR = (
    Names(
        owner="torch",
        names={"is_autocast_enabled": None},
        why="without a device it asks for CUDA's autocast, which is the CPU's here",
        until="fake CUDA tensors run on builds without CUDA",
    ),
)

OPTIMIZERS = (
    Names(
        owner="transformers.trainer_optimizer",
        names={"_OPTIMIZER_HANDLERS": None, "is_torchao_available": None},
        why="creates torchao's optimizers where it is not installed: they are counted by formula",
        until="never: a trace needs no torchao",
    ),
)

ROLLOUTS = (
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

TRL = (
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
    Names(
        owner="trl.trainer.utils",
        names={"hash_module": "module"},
        why="the cache of precomputed log-probabilities is named after the weights' values",
        until="never",
    ),
    Names(
        owner="trl.trainer.utils",
        names={"add_fused_lm_head": "model"},
        why="DPO trainers of LLaMA-Factory and ms-swift compute all logits",
        until="never",
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

DRY_RUN = (
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
