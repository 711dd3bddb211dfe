"""A training setup in the terms of the table, and the question whether it works."""

import importlib.util
from dataclasses import dataclass
from typing import Any

from hf_memopt.compatibility.rules import COMPILE_MODES, PACKAGES, RULES
from hf_memopt.errors import InputError, choose

_ON_PYPI = {"optimi": "torch-optimi"}  # where the name is another than the module's


@dataclass(frozen=True)
class Setup:
    """What decides whether a job can run.

    Attributes:
        optim: as in TrainingArguments.
        method: full | lora | qlora.
        strategy: none | ddp | zero0 | zero1 | zero2 | zero3 | fsdp1 | fsdp2 | hsdp | tp (Engine.name).
        offload: where the optimizer states are: none | cpu | nvme.
        device: cuda | rocm | mps | xpu | cpu.
        precision: bf16 | fp16 | fp32, of the computation.
        dtype: of the weights that are loaded.
        native_bf16, label: of the device.
        quant_storage: BitsAndBytesConfig.bnb_4bit_quant_storage.
        activation_checkpointing, auto_find_batch_size: as in TrainingArguments.
        compile_mode: torch_compile_mode, of TorchInductor.
        accumulates: gradient_accumulation_steps > 1.
        replicated: more processes than share the weights hold replicas (hsdpN).
        engine_checkpointing: FSDP checkpoints activations itself.
        engine_optimizer: the DeepSpeed JSON names an optimizer, which Trainer takes instead of `optim`.
    """

    optim: str = "adamw_torch_fused"
    method: str = "full"
    strategy: str = "none"
    offload: str = "none"
    device: str = "cuda"
    precision: str = "bf16"
    dtype: str = "float32"
    native_bf16: bool = True
    label: str = "this device"
    quant_storage: str = "uint8"
    activation_checkpointing: bool = False
    auto_find_batch_size: bool = False
    compile_mode: str = "default"
    accumulates: bool = False
    replicated: bool = False
    engine_checkpointing: bool = False
    engine_optimizer: bool = False


def compile_mode(get) -> str:
    """`torch_compile_mode` of TrainingArguments, a field by `get(name)`; other compilers have their own."""
    ours = get("torch_compile_backend") in (None, "inductor")
    return (ours and get("torch_compile_mode")) or "default"


def quant_storage(quantization: Any) -> str:
    """bnb_4bit_quant_storage of a BitsAndBytesConfig or of its fields, by name."""
    config = quantization if isinstance(quantization, dict) else vars(quantization or object)
    return str(config.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")


def refusals(setup: Setup) -> list[str]:
    """One sentence, with the fix, for every row of the table that the setup matches. Empty where it works."""
    if setup.compile_mode not in COMPILE_MODES:
        return [str(choose("torch_compile_mode", setup.compile_mode, COMPILE_MODES))]
    return [
        f"{_named(rule, setup)}: {rule.reason.format(label=setup.label)}; use {rule.instead}"
        for rule in RULES
        if rule.matches(setup)
    ]


def check(setup: Setup) -> None:
    """Raise for the first thing that keeps a setup from working, before anything is loaded.

    Raises:
        InputError: a refused combination, or a package that is not installed.
    """
    for refusal in refusals(setup):
        raise InputError(refusal)
    package = PACKAGES.get(setup.optim)
    if package and importlib.util.find_spec(package) is None:
        raise InputError(
            f"optim={setup.optim} needs {package}, which is not installed: pip install "
            f"{_ON_PYPI.get(package, package.replace('_', '-'))}, or use optim=adamw_torch"
        )
    if setup.method == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            "method=qlora needs bitsandbytes, which is not installed: pip install bitsandbytes, or use method=lora"
        )


_WORDS = {"strategy": "with {}", "offload": "with optimizer states offloaded to {}", "device": "on {}"}
_SWITCHES = {
    "accumulates": "with gradient_accumulation_steps > 1",
    "replicated": "with replicas",
    "engine_checkpointing": "with fsdp_activation_checkpointing",
    "engine_optimizer": "with an optimizer in the DeepSpeed JSON",
}


def _named(rule, setup: Setup) -> str:
    """The setup's fields that a row matched, as `field=value` with a connective that reads well."""
    shown = [name for name in rule.when if name not in _SWITCHES and name != "native_bf16"]
    words = [_WORDS.get(name, name + "={}").format(getattr(setup, name)) for name in shown]
    return " ".join(words + [_SWITCHES[name] for name in rule.when if name in _SWITCHES and getattr(setup, name)])
