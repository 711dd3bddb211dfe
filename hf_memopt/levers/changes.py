"""Changes where memory does not suffice: the one table that estimates, plans and explained failures ask.

A row proposes nothing that the compatibility table or another memory feature refuses for the job, so no advice ends in
the next error.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hf_memopt.levers.arguments import FEATURES
from hf_memopt.levers.change import Change
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.features.optimizers import OPTIMIZER_OFFLOAD

SHORTEST = 512  # tokens: shorter samples than these are not proposed


def proposals(job: Facts, changes: Iterable[Change]) -> Iterator[tuple[Change, Mapping[str, Any]]]:
    """Yield those of the changes that the job can take, each with its settings."""
    for change in changes:
        if (settings := change.settings_for(job)) is not None:
            yield change, settings


def advice(job: Facts, changes: Iterable[Change], count: int = 3) -> list[str]:
    """The first of the changes that the job can take, as sentences."""
    texts = []
    for change, settings in proposals(job, changes):
        written = change.written(settings)
        texts.append(f"{written}: {change.effect}" if change.effect else written)
    return texts[:count]


def _halve_micro_batch(job: Facts) -> dict[str, int] | None:
    micro = job.fields.get("per_device_train_batch_size", 1)
    if micro < 2 or job.memory_args.max_tokens_per_batch is not None:
        return None
    accumulation = job.training.get("gradient_accumulation_steps", 1)
    return {
        "per_device_train_batch_size": micro // 2,
        "gradient_accumulation_steps": accumulation * micro // (micro // 2),
    }


def _shorten(job: Facts) -> dict[str, int] | None:
    if job.halved_frames is not None:
        return {"max_frames": job.halved_frames} if job.halved_frames else None
    return {"seq_len": job.seq_len // 2} if job.seq_len and job.seq_len > SHORTEST else None


def _evaluates(job: Facts) -> bool:
    if job.training is None:
        return True
    return bool(job.training.get("eval_strategy")) and job.training.get("per_device_eval_batch_size", 8) > 1


def _trains_all(job: Facts) -> bool:
    return job.setup.method == "full"


# Activations and logits
CHECKPOINTING = Change(
    # Passing kwargs without use_reentrant would select torch's reentrant variant, which loses adapters' gradients.
    settings={"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}},
    applies=lambda job: not (job.setup.activation_checkpointing or job.setup.engine_checkpointing),
    label="activation_checkpointing=true",
    effect="activations are computed again in the backward pass instead of kept",
)
MICRO_BATCH = Change(compute=_halve_micro_batch)
SMALLER_BATCH = Change(label="half the per_device_train_batch_size, twice the gradient_accumulation_steps")
SHORTER = Change(compute=_shorten)
SHORTER_SAMPLES = Change(label="shorter samples (max_length)")

# Weights, gradients and optimizer states
ADAM_8BIT = Change(
    settings={"optim": "adamw_8bit"},
    applies=lambda job: _trains_all(job) and job.setup.optim.startswith("adamw_torch"),
    effect="2 bytes a weight instead of 8",
)
BF16_WEIGHTS = Change(
    settings={"dtype": "bfloat16"},
    applies=lambda job: _trains_all(job) and job.setup.dtype == "float32" and job.setup.native_bf16,
    effect="updates below 2**-8 of a weight are lost",
)
LORA = Change(
    settings={"method": "lora"},
    applies=_trains_all,
    label="--method lora",
    effect="gradients and optimizer states of the adapters alone",
)
QLORA = Change(
    settings={"method": "qlora"},
    applies=lambda job: job.setup.method != "qlora",
    label="--method qlora",
    effect="weights in 4 bits",
)
SMALLER_MODEL = Change(label="a smaller model")

# Several devices
FSDP2 = Change(settings={"strategy": "fsdp2"}, applies=lambda job: job.engine.replicates)
ZERO2 = Change(
    settings={"strategy": "zero2"},
    applies=lambda job: job.engine.plain,
    label="strategy zero2 on several devices",
    effect="each holds a part of gradients and optimizer states",
)
ZERO3 = Change(
    settings={"strategy": "zero3"},
    applies=lambda job: job.engine.plain,
    label="strategy zero3 or fsdp2 on several devices",
    effect="each holds a part of the weights",
)
ZERO3_OFFLOAD = Change(
    settings={"strategy": "zero3_offload_cpu", "optim": "adamw_torch"},
    applies=lambda job: job.discrete_memory and (job.setup.strategy, job.setup.offload) != ("zero3", "cpu"),
    label="strategy zero3_offload_cpu",
    effect="weights and optimizer states in host memory",
)

# What a failing call asks for
FEWER_PIXELS = Change(
    label="fewer pixels an image (the processor's max_pixels, --max_pixels_per_frame)",
    effect="the vision tower's patches, and its attention over them, grow with the pixels",
)
FEWER_FRAMES = Change(label="fewer frames a video (--max_frames)")
SDPA = Change(
    label="attn_implementation=sdpa or flash_attention_2",
    effect="no tensor of all attention scores, which grows with the square of the length",
)
VISION_FLASH = Change(
    applies=lambda job: job.setup.device in ("cuda", "rocm"),
    label="attn_implementation=flash_attention_2",
    effect="images need no mask of all patches by all patches",
)
LIGER = Change(
    applies=lambda job: job.setup.device in ("cuda", "rocm", "xpu"),
    label="use_liger_kernel=true",
    effect="logits and loss in one kernel, a part at a time",
)
NO_KBIT_CAST = Change(
    label="leave prepare_model_for_kbit_training out",
    effect="it casts all weights that are not quantized to fp32, embeddings and head too; freeze them and call "
    "enable_input_require_grads() instead",
)
NO_MEAN_RESIZING = Change(
    label="resize_token_embeddings(..., mean_resizing=False), before the model is on the device",
    effect="no covariance of all embeddings in fp32",
)
GENERATE_LESS = Change(label="fewer sequences generated at once", effect="the KV cache grows with each")
SHORTER_GENERATION = Change(
    label="max_new_tokens (generation_max_length, max_completion_length) lower", effect="the KV cache grows with it"
)
FEWER_COMPLETIONS = Change(
    label=f"{SMALLER_BATCH.label}, num_generations as it divides",
    effect="it counts completions, and generation holds the KV cache of all of them",
)
SHORTER_COMPLETIONS = Change(label="max_completion_length lower", effect="KV cache and logits grow with it")
PRECOMPUTE_REFERENCE = Change(
    label="precompute_ref_log_probs=true", effect="the reference model runs before training, and is not held in it"
)
ADAPTER_REFERENCE = Change(
    label="LoRA without a ref_model", effect="the reference is the model itself, its adapters switched off"
)
LESS_FOR_VLLM = Change(
    label="vllm_gpu_memory_utilization lower, with vllm_enable_sleep_mode=true", effect="vLLM shares training's device"
)
HALF_PAIRS = replace(SMALLER_BATCH, effect="chosen and rejected answers run in one batch of twice its size")

# Host memory
MORE_HOST_MEMORY = Change(
    label="more host memory: a higher limit (Slurm's --mem, Kubernetes' limits.memory, docker run --memory), or swap"
)
LOAD_ONCE = Change(
    label="fsdp_cpu_ram_efficient_loading: true, or zero3_init_flag: true",
    effect="else each process loads the whole model into host memory",
)
OFFLOAD_LESS = Change(
    label="offload less (offload_optimizer, offload_param), or to NVMe",
    effect="hf-memopt estimate says what host memory a job takes",
)
FEWER_WORKERS = Change(
    label="dataloader_num_workers or dataloader_prefetch_factor lower",
    effect="each worker holds batches",
)
NO_PIN_MEMORY = Change(
    label="dataloader_pin_memory=false", effect="under WSL a process may pin only a little memory (microsoft/WSL#8447)"
)
UNOFFLOADED_CHECKPOINTS = Change(
    label='use_gradient_checkpointing=True instead of "unsloth"',
    effect="the latter copies activations to pinned host memory",
)
UNPINNED_OFFLOAD = Change(label="pin_memory: false in the DeepSpeed JSON's offload_optimizer and offload_param")

# Evaluation, saving, resuming
EVAL_ACCUMULATION = Change(
    settings={"eval_accumulation_steps": 1},
    applies=lambda job: job.training is None or job.keeps_eval_logits,
    effect="logits of each batch go to host memory, instead of those of all batches staying on the device",
)
EVAL_ARGMAX = Change(
    label="preprocess_logits_for_metrics", effect="a function that returns logits.argmax(-1): ids are kept, not logits"
)
EVAL_BATCH = Change(settings={"per_device_eval_batch_size": 1}, applies=_evaluates)
EVAL_HALVES = Change(label="MemoryTrainer: evaluation halves its own batch")
EVAL_TOKENS = Change(
    settings={"reduce_eval_logits": True}, effect="MemoryTrainer keeps the likeliest tokens instead of all logits"
)
SHARDED_SAVE = Change(
    label="fsdp_state_dict_type: SHARDED_STATE_DICT, or stage3_gather_16bit_weights_on_model_save: false"
)
SAVE_MODEL_ONLY = Change(settings={"save_only_model": True})
SAVE_BY_TENSOR = Change(label="MemoryTrainer: it saves tensor by tensor where memory is short")
RESUME_THROUGH_HOST = Change(label="MemoryTrainer: it loads optimizer states through host memory")

# Memory that changes from step to step
PROBE = Change(settings={"probe_worst_batch": True}, effect="the largest batch is tried before step 0")
MEMORY_TRAINER = Change(label="MemoryTrainer: a batch that does not fit runs in chunks, and growth is named")
EXPANDABLE_SEGMENTS = Change(
    applies=lambda job: job.setup.device == "cuda", label="PYTORCH_ALLOC_CONF=expandable_segments:True"
)
SPLIT_SIZE = Change(applies=lambda job: job.setup.device == "rocm", label="PYTORCH_ALLOC_CONF=max_split_size_mb:256")
GROUP_BY_LENGTH = Change(
    settings={"train_sampling_strategy": "group_by_length"}, effect="samples of about one length in each batch"
)
EMPTY_CACHE = Change(settings={"torch_empty_cache_steps": 50})

# Devices that other processes use
END_OTHERS = Change(
    label="end them (`hf-memopt monitor` lists them), or choose another device with CUDA_VISIBLE_DEVICES"
)
AUTO = Change(label="--preset auto", effect="plans for the memory that is free")
MEMORY_LIMIT = Change(label="max_memory_gib", effect="where several jobs share a device on purpose")

# What an estimate tries, one at a time, to see which saves most.
ESTIMATED = (
    CHECKPOINTING,
    *(feature.proposed for feature in FEATURES if feature.proposed),
    MICRO_BATCH,
    EVAL_BATCH,
    EVAL_ACCUMULATION,
    ADAM_8BIT,
    OPTIMIZER_OFFLOAD,
    SHORTER,
    FSDP2,
)
# What helps most jobs that fail with a single sample, the most effective first.
USUAL = (CHECKPOINTING, ADAM_8BIT, SHORTER_SAMPLES, LORA, QLORA, SMALLER_MODEL)
