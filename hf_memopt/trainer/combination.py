"""What a Trainer was given, asked of the compatibility table before it trains."""

import re
from typing import Any

import torch
from transformers import TrainingArguments

from hf_memopt.compatibility.launch import cannot_start
from hf_memopt.compatibility.mesh import Mesh, mesh_strategy
from hf_memopt.compatibility.resolve import resolve_engine
from hf_memopt.compatibility.rules import BITSANDBYTES
from hf_memopt.compatibility.setup import Setup, check, compile_mode, quant_storage
from hf_memopt.errors import InputError
from hf_memopt.hardware.detection import detect


def check_given(given: tuple, kwargs: dict[str, Any], replaced: bool) -> None:
    """check_combination() of a Trainer's constructor arguments.

    Trainers agree on the names `model` and `args`, not on their places (TRL's GRPOTrainer has reward_funcs between).

    Raises:
        InputError: the combination does not work.
    """
    model = kwargs.get("model", given[0] if given else None)
    args = kwargs.get("args") or next((value for value in given if isinstance(value, TrainingArguments)), None)
    if args is not None:
        optimizer = (kwargs.get("optimizers") or (None,))[0]
        check_combination(model, args, _accelerators_state(), optimizer, replaced)


def check_combination(model, args, state=None, optimizer=None, replaced: bool = False) -> None:
    """Refuse what cannot train.

    Args:
        state: accelerate's, where there is one already.
        optimizer: made by the user; by default the one that `args.optim` names.
        replaced: something else than `args.optim` makes it.

    Raises:
        InputError: the combination does not work.
    """
    check(describe_setup(model, args, state, optimizer, replaced))


def describe_setup(model, args, state=None, optimizer=None, replaced: bool = False) -> Setup:
    """A Trainer's job in the terms of the compatibility table; arguments as for check_combination()."""
    sizes = _mesh(model)
    engine = resolve_engine(args, state, mesh_strategy(*_sizes_over_one(sizes)))
    if optimizer is not None or replaced:
        optim = _optim_of(optimizer)
    else:
        optim = str(getattr(args.optim, "value", args.optim))
    return Setup(
        **engine.setup(),
        **_device(args),
        **_of_model(model),
        optim=optim,
        precision={"no": "fp32"}.get(args.mixed_precision, args.mixed_precision),
        activation_checkpointing=bool(args.activation_checkpointing),
        auto_find_batch_size=bool(args.auto_find_batch_size),
        accumulates=args.gradient_accumulation_steps > 1,
        compile_mode=compile_mode(lambda name: getattr(args, name, None)),
        replicated=sizes.dp_replicate_size > 1,
    )


def check_start(args, state=None) -> None:
    """Refuse to train where DeepSpeed cannot start.

    Raises:
        InputError: with what to change.
    """
    if reason := cannot_start(resolve_engine(args, state)):
        raise InputError(reason)


def _accelerators_state():
    """The state of an Accelerator that the script has made and that TrainingArguments kept; None without one."""
    from accelerate.state import AcceleratorState

    return AcceleratorState() if AcceleratorState._shared_state else None


def _mesh(model) -> Mesh:
    """How transformers shards the model."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return Mesh()
    config = model.config.distributed_config
    return Mesh(*(getattr(config, name, None) or 1 for name in ("tp_size", "fsdp_size", "dp_replicate_size")))


def _sizes_over_one(sizes: Mesh) -> list[int | None]:
    return [size if size > 1 else None for size in (sizes.tp_size, sizes.fsdp_size)]


def _device(args) -> dict[str, Any]:
    """The device that `args` train on, in the terms of the table."""
    if args.device.type == "cpu":
        return {"device": "cpu", "label": "the CPU"}
    found = detect()
    # bf16 that a card emulates (T4) is slow, not wrong: presets refuse it, a job that somebody brings may have it.
    return {"device": found.backend, "label": found.label}


def _of_model(model) -> dict[str, Any]:
    """Method, dtype and storage of the weights."""
    if not isinstance(model, torch.nn.Module):  # None or a name: the Trainer makes it
        return {}
    trained = next((weight.dtype for weight in model.parameters() if weight.requires_grad), "torch.float32")
    adapters = getattr(model, "peft_config", None) is not None
    quantized = bool(getattr(model, "is_loaded_in_4bit", False))
    return {
        "method": "qlora" if quantized else "lora" if adapters else "full",
        "dtype": str(trained).removeprefix("torch."),
        "quant_storage": quant_storage(getattr(getattr(model, "config", None), "quantization_config", None)),
    }


def _optim_of(optimizer) -> str:
    """The `optim` of an optimizer object that has rows in the table: AdamW8bit is adamw_8bit."""
    name = re.sub(r"(?<=[a-z])(?=\d)", "_", type(optimizer).__name__.lower()).replace("paged", "paged_")
    return name if name in BITSANDBYTES | {"adafactor"} else "adamw_torch"
