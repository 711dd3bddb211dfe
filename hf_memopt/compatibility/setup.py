"""Check a training setup against the table of combinations that do not work."""

from dataclasses import dataclass
from typing import Any

from hf_memopt.compatibility.rules import COMPILE_MODES, PACKAGES, RULES
from hf_memopt.errors import InputError, choose
from hf_memopt.packages import how_to_install, is_installed


@dataclass(frozen=True)
class Setup:
    """The settings of a job that the compatibility table looks at.

    Attributes:
        optim: as in TrainingArguments.
        method: full | lora | qlora.
        strategy: none | ddp | zero0 | zero1 | zero2 | zero3 | fsdp1 | fsdp2 | hsdp | tp (engines.Engine.name).
        offload: where the optimizer states are: none | cpu | nvme.
        device: cuda | rocm | mps | xpu | cpu.
        precision: bf16 | fp16 | fp32, of the computation.
        dtype: of the loaded weights.
        native_bf16, label: of the device.
        quant_storage: BitsAndBytesConfig.bnb_4bit_quant_storage.
        activation_checkpointing, auto_find_batch_size: as in TrainingArguments.
        compile_mode: torch_compile_mode, of TorchInductor.
        accumulates: gradient_accumulation_steps > 1.
        replicated: hsdpN on more than N processes, so that the sharded model has replicas.
        engine_checkpointing: FSDP checkpoints activations itself.
        engine_optimizer: the DeepSpeed JSON has an optimizer, which Trainer uses instead of `optim`.
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
    """TorchInductor's mode; "default" for other compilers, which have modes of their own.

    Args:
        get: looks up a TrainingArguments field by name.
    """
    ours = get("torch_compile_backend") in (None, "inductor")
    return (ours and get("torch_compile_mode")) or "default"


def quant_storage(quantization: Any) -> str:
    """bnb_4bit_quant_storage of a BitsAndBytesConfig, or of a dict of its fields, as a dtype's name."""
    config = quantization if isinstance(quantization, dict) else vars(quantization or object)
    return str(config.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")


def refusals(setup: Setup) -> list[str]:
    """One sentence, with the fix, for each row of the table that the setup matches; empty if it works."""
    if setup.compile_mode not in COMPILE_MODES:
        return [str(choose("torch_compile_mode", setup.compile_mode, COMPILE_MODES))]
    return [
        f"{_matched_fields(rule, setup)}: {rule.reason.format(label=setup.label)}; use {rule.instead}"
        for rule in RULES
        if rule.matches(setup)
    ]


def check(setup: Setup) -> None:
    """Raise for the first problem of a setup, before anything is loaded.

    Raises:
        InputError: a refused combination, or a package that is not installed.
    """
    for refusal in refusals(setup):
        raise InputError(refusal)
    check_package(setup.optim)
    if setup.method == "qlora" and not is_installed("bitsandbytes"):
        raise InputError(
            "method=qlora needs bitsandbytes, which is not installed: pip install bitsandbytes, or use method=lora"
        )


def check_package(optim: str) -> None:
    """Refuse an optimizer whose package is not installed.

    Raises:
        InputError: names the package, and how to install it.
    """
    package = PACKAGES.get(optim)
    if package and not is_installed(package):
        raise InputError(
            f"optim={optim} needs {package}, which is not installed: {how_to_install(package)}, "
            "or use optim=adamw_torch"
        )


_PHRASES = {"strategy": "with {}", "offload": "with optimizer states offloaded to {}", "device": "on {}"}
_SWITCHES = {
    "accumulates": "with gradient_accumulation_steps > 1",
    "replicated": "with replicas",
    "engine_checkpointing": "with fsdp_activation_checkpointing",
    "engine_optimizer": "with an optimizer in the DeepSpeed JSON",
}


def _matched_fields(rule, setup: Setup) -> str:
    """The fields that a row matched, as in `optim=adafactor with fsdp2 on cpu`."""
    shown = [name for name in rule.when if name not in _SWITCHES and name != "native_bf16"]
    phrases = [_PHRASES.get(name, name + "={}").format(getattr(setup, name)) for name in shown]
    return " ".join(phrases + [_SWITCHES[name] for name in rule.when if name in _SWITCHES and getattr(setup, name)])
