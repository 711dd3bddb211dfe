"""What presets of one kind share; each named preset calls one of these and changes a line."""

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from hf_memopt.errors import InputError
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.presets.batch import batch_settings
from hf_memopt.presets.preset import Preset, with_strategy

# The model that the recipes train where none is named.
BUILTIN = "builtin"
# The hub ids of the reference models, smallest first.
SMOLLM_135M = "HuggingFaceTB/SmolLM2-135M"
SMOLLM_360M = "HuggingFaceTB/SmolLM2-360M"
QWEN_0_6B = "Qwen/Qwen3-0.6B"
QWEN_1_7B = "Qwen/Qwen3-1.7B"
QWEN_4B = "Qwen/Qwen3-4B"
QWEN_8B = "Qwen/Qwen3-8B"
QWEN_14B = "Qwen/Qwen3-14B"
QWEN_32B = "Qwen/Qwen3-32B"
LLAMA_70B = "meta-llama/Llama-3.1-70B"
LLAMA_405B = "meta-llama/Llama-3.1-405B"

_CHECKPOINTING = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"use_reentrant": False},
}
_LOADER = {
    "dataloader_num_workers": 4,
    "dataloader_prefetch_factor": 2,
    "dataloader_persistent_workers": True,
    "dataloader_pin_memory": True,
}


def describe(function) -> str:
    """A preset function's docstring on one line."""
    return " ".join((function.__doc__ or "").split())


def single(function, method: str, sizes: dict[str, tuple[int, int, int, str]], **changes: Any) -> Preset:
    """A preset for one device.

    Args:
        function: the preset's function; its name is the preset's, its docstring the description.
        method: full | lora | qlora.
        sizes: method -> (micro-batch, accumulation, tokens, reference model).
        changes: TrainingArguments fields that differ from the device's defaults; None takes one out.
    """
    micro, accumulation, tokens, model = sizes[method]
    hardware = get_hardware(function.__name__)
    training = {**_device_defaults(hardware, method), **changes}
    training = {name: value for name, value in training.items() if value is not None}
    if not training.get("activation_checkpointing"):
        training.pop("activation_checkpointing_kwargs", None)
    return Preset(
        name=function.__name__,
        hardware=hardware,
        method=method,
        strategy="none",
        processes=1,
        micro_batch_size=micro,
        effective_batch_size=micro * accumulation,
        seq_len=tokens,
        reference_model=model,
        meant_for=describe(function),
        dtype=_weights_dtype(training, method),
        training=MappingProxyType(training),
        environment=MappingProxyType(_environment(hardware)),
    )


def several(preset: Preset, function, processes: int, strategy: str, sizes: dict[str, tuple[int, int, int, str]]):
    """A preset for several of a single preset's devices; `sizes` as in `single`."""
    micro, accumulation, tokens, model = sizes[preset.method]
    return replace(
        with_strategy(preset, strategy),
        name=function.__name__,
        processes=processes,
        micro_batch_size=micro,
        effective_batch_size=micro * accumulation * processes,
        seq_len=tokens,
        reference_model=model,
        meant_for=describe(function),
    )


def on_machines(preset: Preset, machines: int) -> Preset:
    """The preset on several machines, each with its devices. The effective batch stays where they can share it.

    Raises:
        InputError: no such number of machines.
    """
    if machines < 1:
        raise InputError(f"machines={machines} must be at least 1")
    if machines > 1 and preset.strategy == "none":
        raise InputError(f"preset {preset.name} is for one device: machines={machines} needs a preset of several")
    if preset.machines > 1:
        raise InputError(f"preset {preset.name} is for {preset.machines} machines already: leave machines out")
    devices = preset.processes * machines
    batch = -(-preset.effective_batch_size // devices) * devices
    micro, _ = batch_settings(batch, preset.micro_batch_size, devices)
    return replace(preset, processes=devices, machines=machines, effective_batch_size=batch, micro_batch_size=micro)


def retrained(preset: Preset, **changes: Any) -> Preset:
    """The preset with other TrainingArguments fields; None takes one out."""
    training = {name: value for name, value in {**preset.training, **changes}.items() if value is not None}
    return replace(preset, training=MappingProxyType(training))


def _device_defaults(hardware: Hardware, method: str) -> dict[str, Any]:
    if hardware.backend == "cpu":
        return {"use_cpu": True, "optim": "adamw_torch", "dataloader_pin_memory": False}
    training: dict[str, Any] = dict(_CHECKPOINTING)
    training |= {"optim": _optimizer(hardware, method)}
    if hardware.backend == "mps":
        # Unified memory: worker processes and pinned copies would compete with the model.
        return training | _precision(hardware) | {"dataloader_pin_memory": False}
    training |= _precision(hardware)
    training |= _LOADER
    if hardware.backend == "cuda":
        capability = float(hardware.architecture)
        training["tf32"] = True if capability >= 8.0 else None
        # Hopper and later: enough compute for the compiler to matter, and the memory for its warm-up.
        training["torch_compile"] = True if capability >= 9.0 and method != "qlora" and _large(hardware) else None
    return training


def _precision(hardware: Hardware) -> dict[str, bool]:
    return {"bf16": True} if hardware.native_bf16 else {"fp16": True}


def _optimizer(hardware: Hardware, method: str) -> str:
    """8-bit states where they matter and work; LoRA's states are too few to matter."""
    if hardware.backend == "mps":
        return "adamw_torch"  # bitsandbytes has no optimizer kernel for MPS
    # Published bitsandbytes builds name RDNA 3 and CDNA; RDNA 2 (gfx1031) is not among them.
    if method == "lora" or hardware.architecture.startswith("gfx103"):
        return "adamw_torch_fused"
    if method == "qlora":
        return "paged_adamw_8bit" if hardware.backend == "cuda" else "adamw_8bit"
    return "adamw_torch_fused" if _large(hardware) else "adamw_8bit"


def _weights_dtype(training: dict[str, Any], method: str) -> str:
    """fp32 master weights for what is trained in full; frozen weights in the computing dtype.

    Pure bf16 training loses updates smaller than 2**-8 of a weight, and the fp16 gradient scaler needs fp32
    gradients. Adapters are fp32 in either case (peft's autocast_adapter_dtype).
    """
    if method == "full" or not (training.get("bf16") or training.get("fp16")):
        return "float32"
    return "bfloat16" if training.get("bf16") else "float16"


def _large(hardware: Hardware) -> bool:
    return hardware.is_large


def _environment(hardware: Hardware) -> dict[str, str]:
    if hardware.backend == "cuda":
        return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if hardware.backend == "cpu":
        return {"DS_ACCELERATOR": "cpu"}
    if hardware.architecture == "gfx1031":
        return {"HSA_OVERRIDE_GFX_VERSION": "10.3.0"}  # runs it as gfx1030, which ROCm's libraries are built for
    return {}
