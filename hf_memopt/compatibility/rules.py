"""Combinations of settings that do not work: each with the reason, the fix and the source of the fact.

A row matches when every field it names has one of the listed values. As a source, "run" means that the combination
was run on CPU with transformers 5.23, accelerate 1.15, DeepSpeed 0.19.8, bitsandbytes 0.50.2 and torch 2.13; "source"
means that the code of those versions says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass

BNB_8BIT = frozenset(
    {
        "adamw_8bit",
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
        "ademamix_8bit",
        "paged_ademamix_8bit",
        "rmsprop_bnb_8bit",
    }
)
BNB_LION = frozenset({"lion_8bit", "paged_lion_8bit"})
BNB_32BIT = frozenset(
    {
        "paged_adamw_32bit",
        "paged_ademamix_32bit",
        "ademamix",
        "lion_32bit",
        "paged_lion_32bit",
        "rmsprop_bnb",
        "rmsprop_bnb_32bit",
    }
)
BITSANDBYTES = BNB_8BIT | BNB_LION | BNB_32BIT
LAYERWISE = frozenset(
    {
        "galore_adamw_layerwise",
        "galore_adamw_8bit_layerwise",
        "galore_adafactor_layerwise",
        "apollo_adamw_layerwise",
    }
)
LOMO = frozenset({"lomo", "adalomo"})
STEPS_IN_BACKWARD = LAYERWISE | LOMO
# Gradients are projected to a low rank: GaLore's and APOLLO's.
PROJECTED = LAYERWISE | {"galore_adamw", "galore_adamw_8bit", "galore_adafactor", "apollo_adamw"}
# What accelerate's map_pytorch_optim_to_deepspeed (1.15) turns into the same algorithm on the host.
_SAME_ON_HOST = frozenset({"adamw_torch", "adamw_torch_fused", "adagrad", "lion_32bit", "paged_adamw_32bit"})

ZERO = frozenset({"zero1", "zero2", "zero3"})
MESH = frozenset({"hsdp", "tp"})  # sharded by transformers itself, through DistributedConfig
FSDP = frozenset({"fsdp1", "fsdp2"})
DTENSOR = MESH | {"fsdp2"}
SHARDED = ZERO | MESH | FSDP
DISTRIBUTED = SHARDED | {"ddp", "zero0"}
OFFLOADED = frozenset({"cpu", "nvme"})
GPU = frozenset({"cuda", "rocm", "mps", "xpu"})

# torch_compile_mode: torch._inductor.list_mode_options() of torch 2.13.
COMPILE_MODES = frozenset({"default", "lite", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"})
CUDA_GRAPHS = frozenset({"reduce-overhead", "max-autotune"})

# optim -> the module that provides it, where it is not torch's or transformers' own.
PACKAGES = {
    **dict.fromkeys(BITSANDBYTES, "bitsandbytes"),
    **dict.fromkeys(("adamw_torch_4bit", "adamw_torch_8bit"), "torchao"),
    **dict.fromkeys((name for name in LAYERWISE if name.startswith("galore")), "galore_torch"),
    **dict.fromkeys(("galore_adamw", "galore_adamw_8bit", "galore_adafactor"), "galore_torch"),
    **dict.fromkeys(("apollo_adamw", "apollo_adamw_layerwise"), "apollo_torch"),
    **dict.fromkeys(("lomo", "adalomo"), "lomo_optim"),
    **dict.fromkeys(("schedule_free_radam", "schedule_free_adamw", "schedule_free_sgd"), "schedulefree"),
    "grokadamw": "grokadamw",
    "stable_adamw": "optimi",
    "adamw_anyprecision": "torchdistx",
}


# All of transformers' but torch's AdamW and its variants.
_OTHER_OPTIMIZERS = frozenset(PACKAGES) | {"adafactor", "sgd", "adagrad", "rmsprop"}


@dataclass(frozen=True)
class Rule:
    """A refused combination.

    Attributes:
        when: field of Setup -> values that match.
        reason: what would go wrong; `{label}` becomes the device's.
        instead: the setting that works.
        source: where the fact comes from.
    """

    when: Mapping[str, frozenset]
    reason: str
    instead: str
    source: str

    def matches(self, setup) -> bool:
        return all(getattr(setup, field) in values for field, values in self.when.items())


def _rule(reason: str, instead: str, source: str, **when) -> Rule:
    values = {key: value if isinstance(value, frozenset) else frozenset({value}) for key, value in when.items()}
    return Rule(values, reason, instead, source)


RULES = [
    # Optimizer × DeepSpeed
    _rule(
        "the DeepSpeed JSON has an `optimizer`, which Trainer uses instead of optim",
        "a JSON without `optimizer`, or optim=adamw_torch",
        "source: transformers.integrations.deepspeed.deepspeed_optim_sched",
        optim=_OTHER_OPTIMIZERS,
        strategy=ZERO | {"zero0"},
        engine_optimizer=True,
    ),
    _rule(
        "DeepSpeed makes it again with one group of weights where the Trainer's has two, and raises in the first step",
        "optim=adamw_torch",
        "run; deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer.initialize_optimizer_states, and stage3's",
        optim="adagrad",
        strategy=ZERO,
        offload="none",
        engine_optimizer=False,
    ),
    _rule(
        "it makes its states for whole weights, before FSDP2 puts shards in their place, and raises at the first step",
        "optim=adamw_torch",
        "source: torch.optim.Adagrad.__init__, accelerate.Accelerator._prepare_fsdp2",
        optim="adagrad",
        strategy="fsdp2",
    ),
    # Optimizer × offload
    _rule(
        "accelerate makes DeepSpeedCPUAdagrad with `adamw_mode`, which it does not take, and raises",
        "optim=adamw_torch",
        "run; accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed",
        optim="adagrad",
        strategy=ZERO,
        offload=OFFLOADED,
        engine_optimizer=False,
    ),
    _rule(
        "accelerate replaces it with DeepSpeedCPUAdam in L2 mode with fp32 states: neither 8-bit nor AdamW",
        "optim=adamw_torch (DeepSpeedCPUAdam in AdamW mode)",
        "run; accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed",
        optim=BNB_8BIT,
        strategy=ZERO,
        offload=OFFLOADED,
        engine_optimizer=False,
    ),
    _rule(
        "accelerate replaces it with DeepSpeedCPUAdam in L2 mode, a different algorithm",
        "optim=adamw_torch, or optim=lion_32bit (DeepSpeedCPULion)",
        "run; accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed",
        optim=BNB_LION | {"paged_lion_32bit"},
        strategy=ZERO,
        offload=OFFLOADED,
        engine_optimizer=False,
    ),
    _rule(
        "accelerate replaces it with DeepSpeedCPUAdam, a different algorithm",
        "optim=adamw_torch",
        "source: accelerate.utils.deepspeed.map_pytorch_optim_to_deepspeed",
        optim=_OTHER_OPTIMIZERS - _SAME_ON_HOST - BNB_8BIT - BNB_LION - {"paged_lion_32bit", "adafactor"},
        strategy=ZERO,
        offload=OFFLOADED,
        engine_optimizer=False,
    ),
    _rule(
        "accelerate passes its parameter groups to DeepSpeedCPUAdam, whose step fails with a TypeError",
        "optim=adamw_torch",
        "run",
        optim="adafactor",
        strategy=ZERO,
        offload=OFFLOADED,
        engine_optimizer=False,
    ),
    # Optimizer × FSDP2
    _rule(
        "its kernel mixes Tensor and DTensor and raises at the first step (bitsandbytes issue 1633)",
        "optim=adamw_torch_8bit (needs torchao) or optim=adamw_torch_fused",
        "run on gloo with fully_shard",
        optim=BITSANDBYTES,
        strategy=DTENSOR,
    ),
    _rule(
        "its step raises a RuntimeError on DTensor weights",
        "optim=adamw_torch_fused or optim=adamw_torch_8bit",
        "run on gloo with fully_shard",
        optim="adafactor",
        strategy=DTENSOR,
    ),
    _rule(
        "torchao's 4-bit states fail an assertion on DTensor",
        "optim=adamw_torch_8bit",
        "run on gloo with fully_shard",
        optim="adamw_torch_4bit",
        strategy=DTENSOR,
    ),
    # Optimizer × device
    _rule(
        "bitsandbytes has no optimizer kernel for Apple's MPS",
        "optim=adamw_torch or optim=adafactor",
        "source: bitsandbytes/backends/mps registers no optimizer_update",
        optim=BITSANDBYTES,
        device="mps",
    ),
    _rule(
        "it is the optimizer of XLA devices such as TPUs, from torch_xla",
        "optim=adamw_torch_fused",
        "source: transformers.trainer_optimizer._get_adamw_torch_xla",
        optim="adamw_torch_xla",
    ),
    _rule(
        "it is the optimizer of Ascend NPUs, from torch_npu",
        "optim=adamw_torch_fused",
        "source: transformers.trainer_optimizer._get_adamw_torch_npu_fused",
        optim="adamw_torch_npu_fused",
    ),
    _rule(
        "DeepSpeed steps over flat partitions of the weights, and a projection needs matrices",
        "optim=adamw_8bit or optim=adafactor",
        "run with galore-torch 1.0 and apollo-torch 1.0.3",
        optim=PROJECTED,
        strategy=ZERO,
    ),
    _rule(
        "accelerate passes its learning rate to DeepSpeed's backward, which raises a TypeError",
        "optim=adafactor, or strategy none",
        "run with lomo-optim 0.1.1; accelerate.Accelerator.backward",
        optim=LOMO,
        strategy=ZERO | {"zero0"},
    ),
    _rule(
        "its hooks are on the weights that sharding replaces",
        "optim=adamw_torch_fused, or strategy none",
        "source: accelerate.utils.fsdp_utils.fsdp2_prepare_model; lomo_optim/lomo.py",
        optim=LOMO,
        strategy=DTENSOR,
    ),
    # Layer-wise optimizers
    _rule(
        "transformers does not pass relative_step=False to its optimizers, which then refuse a learning rate",
        "optim=galore_adafactor",
        "run with galore-torch 1.0; transformers.trainer_optimizer._get_galore_optimizer",
        optim="galore_adafactor_layerwise",
    ),
    _rule(
        "layer-wise optimizers step during backward, so gradients cannot accumulate",
        "gradient_accumulation_steps=1, or the same optimizer without _layerwise",
        "source: transformers.trainer_optimizer",
        optim=LAYERWISE,
        accumulates=True,
    ),
    _rule(
        "layer-wise optimizers do not support distributed training",
        "the same optimizer without _layerwise",
        "source: transformers.trainer_optimizer",
        optim=LAYERWISE,
        strategy=DISTRIBUTED,
    ),
    # Quantization
    _rule(
        "FSDP does not shard 4-bit weights that are stored as uint8",
        "quantization.bnb_4bit_quant_storage=bfloat16",
        "source: accelerate.utils.fsdp_utils",
        method="qlora",
        strategy=FSDP,
        quant_storage="uint8",
    ),
    _rule(
        "sharding drops the quantization state of 4-bit weights ('DTensor' object has no attribute "
        "'compress_statistics')",
        "strategy fsdp2 or zero2, or method=lora",
        "run on gloo",
        method="qlora",
        strategy=MESH,
    ),
    # peft
    _rule(
        "peft sizes the adapters by each rank's shard, which does not match the layers' outputs",
        "strategy fsdp2 or zero3, or hsdpN with as many processes as N",
        "run on gloo; peft 0.21.2, tuners_utils._get_in_out_features",
        method="lora",
        strategy="hsdp",
        replicated=True,
    ),
    _rule(
        "peft sizes the adapters by each rank's shard, which does not match the layers' outputs",
        "strategy fsdp2 or zero3",
        "run on gloo; peft 0.21.2, tuners_utils._get_in_out_features",
        method="lora",
        strategy="tp",
    ),
    # Precision
    _rule(
        "{label} only emulates bfloat16, slowly, although torch.cuda.is_bf16_supported() returns True",
        "fp16=True with dtype=float32 weights",
        "CUDA C++ Programming Guide; transformers' note on M1 and M2",
        precision="bf16",
        native_bf16=False,
        device=GPU,
    ),
    _rule(
        "the gradient scaler cannot unscale float16 gradients",
        "dtype=float32",
        "source: torch.amp.GradScaler.unscale_ (Attempting to unscale FP16 gradients)",
        method="full",
        precision="fp16",
        dtype="float16",
        strategy=frozenset({"none", "ddp"}),
    ),
    # Devices and engines
    _rule(
        "NCCL, Gloo and DeepSpeed do not support Apple's MPS",
        "strategy none, one process",
        "source: torch.distributed has no MPS backend",
        device="mps",
        strategy=DISTRIBUTED,
    ),
    _rule("accelerate does not support FSDP on CPU", "strategy ddp or zero3", "run", device="cpu", strategy=FSDP),
    _rule(
        "accelerate supports tensor parallelism on accelerators only",
        "hsdpN, ddp or zero3",
        "run; accelerate.ParallelismConfig._validate_accelerator",
        device="cpu",
        strategy="tp",
    ),
    _rule(
        "FSDP and TrainingArguments would both checkpoint activations, and Trainer raises an error",
        "one of them: leave activation_checkpointing (gradient_checkpointing) out of the training arguments, or set "
        "fsdp_activation_checkpointing: false in accelerate's file (fsdp_config.activation_checkpointing)",
        "source: transformers.Trainer.create_accelerator_and_postprocess",
        strategy=FSDP,
        activation_checkpointing=True,
        engine_checkpointing=True,
    ),
    _rule(
        "after an OOM auto_find_batch_size restarts the schedule with weights that were already updated, "
        "and ZeRO-3 does not support it",
        "a fixed per_device_train_batch_size",
        "run",
        auto_find_batch_size=True,
        strategy="zero3",
    ),
]
