"""Checks a Trainer's model, arguments and optimizer against the compatibility table before it trains."""

import os
import re
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers import TrainingArguments

from hf_memopt.compatibility.resolve import cannot_start, resolve_engine
from hf_memopt.compatibility.rules import BITSANDBYTES
from hf_memopt.compatibility.setup import Setup, check, compile_mode, quant_storage
from hf_memopt.engines.mesh import Mesh
from hf_memopt.errors import InputError
from hf_memopt.hardware.detection import detect
from hf_memopt.stack.vocabulary import checkpoints_activations


def check_constructor_arguments(args: tuple, kwargs: dict[str, Any], own_optimizer: bool) -> None:
    """check_combination() for a Trainer's constructor arguments.

    Trainers agree on the names `model` and `args`, not on their positions (in TRL's GRPOTrainer reward_funcs lies
    between them), so TrainingArguments are found by type.

    Raises:
        InputError: the combination does not work.
    """
    model = kwargs.get("model", args[0] if args else None)
    training_args = kwargs.get("args") or next((value for value in args if isinstance(value, TrainingArguments)), None)
    if training_args is not None:
        # Of an Accelerator that the script made before TrainingArguments. AcceleratorState() raises where there is
        # none yet, and accelerate 1.15 has no public way to ask.
        state = AcceleratorState() if AcceleratorState._shared_state else None
        optimizer = (kwargs.get("optimizers") or (None,))[0]
        check_combination(model, training_args, state, optimizer, own_optimizer)


def check_combination(model, args, state=None, optimizer=None, own_optimizer: bool = False) -> None:
    """Refuse a combination that cannot train.

    Args:
        state: accelerate's AcceleratorState, where there is one already.
        optimizer: the user's; by default the one that `args.optim` names.
        own_optimizer: something other than `args.optim` makes the optimizer.

    Raises:
        InputError: the combination does not work.
    """
    check(describe_setup(model, args, state, optimizer, own_optimizer))


def describe_setup(model, args, state=None, optimizer=None, own_optimizer: bool = False) -> Setup:
    """A Trainer's job in the terms of the compatibility table; arguments as for check_combination()."""
    sizes = _mesh(model)
    engine = resolve_engine(args, state, sizes.strategy)
    if optimizer is not None or own_optimizer:
        # AdamW8bit -> adamw_8bit, where the compatibility table has that optimizer
        name = re.sub(r"(?<=[a-z])(?=\d)", "_", type(optimizer).__name__.lower()).replace("paged", "paged_")
        optim = name if name in BITSANDBYTES | {"adafactor"} else "adamw_torch"
    else:
        optim = str(getattr(args.optim, "value", args.optim))
    # transformers 4.57 keeps it in the environment alone.
    precision = getattr(args, "mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    return Setup(
        **engine.setup(),
        **_device(args),
        **_model_setup(model),
        optim=optim,
        precision="fp32" if precision == "no" else precision,
        activation_checkpointing=checkpoints_activations(args),
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


def _mesh(model) -> Mesh:
    """The mesh that from_pretrained sharded the model over (distributed_config); sizes of 1 without one."""
    if not getattr(model, "is_distributed_loading_by_transformers", False):
        return Mesh()
    config = model.config.distributed_config
    return Mesh(*(getattr(config, name, None) or 1 for name in ("tp_size", "fsdp_size", "dp_replicate_size")))


def _device(args) -> dict[str, Any]:
    """The device of `args`, as the compatibility table names it."""
    if args.device.type == "cpu":
        return {"device": "cpu", "label": "the CPU"}
    hardware = detect()
    # No bf16 check: a card that emulates it (T4) is slow, not wrong. Presets refuse it, a user's own script may use
    # it.
    return {"device": hardware.backend, "label": hardware.label}


def _model_setup(model) -> dict[str, Any]:
    """Method, dtype and storage of the weights."""
    if not isinstance(model, torch.nn.Module):  # None, or a name that a trainer of TRL loads
        return {}
    trained = next((weight.dtype for weight in model.parameters() if weight.requires_grad), "torch.float32")
    adapters = getattr(model, "peft_config", None) is not None
    quantized = bool(getattr(model, "is_loaded_in_4bit", False))
    return {
        "method": "qlora" if quantized else "lora" if adapters else "full",
        "dtype": str(trained).removeprefix("torch."),
        "quant_storage": quant_storage(getattr(getattr(model, "config", None), "quantization_config", None)),
    }
