"""Training steps of known code: libraries whose losses are sums or means over samples.

Such code may run again, and in chunks. A user's own loss, model or hook cannot be shown to allow that by running it,
so it has to be declared (`loss_reduction`), and what no declaration can cover never runs twice.
"""

import functools
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hf_memopt.trainer.trainer import MemoryTrainer

PACKAGES = {
    *("transformers", "peft", "trl", "torch", "accelerate", "hf_memopt"),
    *("bitsandbytes", "torchao", "gptqmodel", "awq", "hqq", "optimum", "compressed_tensors"),
    *("liger_kernel", "deepspeed", "timm"),
}
# Methods that a Trainer's subclass may override: called outside of a micro-batch, never again for a retry. Any other
# method of a known trainer may be part of its step.
_OUTSIDE_STEPS = {
    *("__init__", "train", "evaluate", "predict", "evaluation_loop", "prediction_step", "log", "log_metrics"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"),
    *("get_decay_parameter_names", "call_model_init", "get_train_dataloader", "get_eval_dataloader"),
    *("get_test_dataloader", "_get_dataloader", "_get_train_sampler", "_get_eval_sampler", "get_batch_samples"),
    *("save_model", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler", "save_metrics", "save_state"),
    *("_load_best_model", "_load_from_checkpoint", "_maybe_log_save_evaluate", "_clip_grad_norm", "optimizer_step"),
    *("push_to_hub", "create_model_card", "add_callback", "store_flos", "floating_point_ops", "_prepare_dataset"),
    *("_set_signature_columns_if_needed", "_generate_single_turn", "loss_is_scaled_for_ga", "_tag_names", "_name"),
    *("count_samples", "split_batch", "when_probed", "packing"),
    *("create_accelerator_and_postprocess", "_wrap_model", "_move_model_to_device", "_remove_unused_columns"),
    *("_get_collator_with_removed_columns", "num_examples", "_save_rng_state", "_load_rng_state", "_evaluate"),
    *("_load_optimizer_and_scheduler", "_load_callback_state", "_issue_warnings_after_load", "_get_output_dir"),
    *("_determine_best_metric", "hyperparameter_search", "_get_learning_rate"),
}
# Parts of a loss that a declaration covers. What else of a step is overridden may do anything: step an optimizer, say.
_LOSS = {"compute_loss", "compute_loss_func"}
_FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def is_known(thing) -> bool:
    """True if a class, function, or object comes from one of PACKAGES.

    A wrapper made with functools.wraps is taken for what it wraps.
    """
    while isinstance(thing, functools.partial):
        thing = thing.func
    module = getattr(thing, "__module__", None) or type(thing).__module__
    return module.split(".")[0] in PACKAGES


def overridden_step(trainer: "MemoryTrainer") -> str:
    """The part of the trainer's step, apart from its loss, that is a user's own; "" where none is."""
    from transformers import Trainer

    # What transformers' Trainer has none of are the methods that TRL's compute_loss is made of.
    name = next((name for name in _overridden(trainer) if name not in _LOSS and hasattr(Trainer, name)), "")
    return f"{type(trainer).__name__} has its own {name}" if name else _own_backward(trainer)


def overridden_loss(trainer: "MemoryTrainer") -> str:
    """The part of the loss that is a user's own: of the trainer, of the model, or a hook; "" where none is."""
    own = next(_overridden(trainer), "")
    if own:
        return f"{type(trainer).__name__} has its own {own}"
    function = trainer.compute_loss_func
    if callable(function) and not is_known(function):
        return f"compute_loss_func is your own ({getattr(function, '__name__', type(function).__name__)})"
    return _own_model(trainer.model) if trainer.model is not None else ""


def overridden_evaluation(trainer: "MemoryTrainer") -> str:
    """The method of an evaluation step that is a user's own; "" where none is."""
    own = (name for name in ("prediction_step", "evaluation_loop") if defined_by_user(type(trainer), name))
    name = next(own, "")
    return f"{type(trainer).__name__} has its own {name}" if name else ""


def own_substep_callback(trainer: "MemoryTrainer") -> str:
    """The user's callback that acts between the micro-batches of a step, which a restarted window would not repeat."""
    for callback in trainer.callback_handler.callbacks:
        if defined_by_user(type(callback), "on_substep_end"):
            return f"{type(callback).__name__} acts between the micro-batches of a step (on_substep_end)"
    return ""


def _overridden(trainer: "MemoryTrainer") -> Iterator[str]:
    """Names of a known trainer's methods that a user's class, or the instance, replaces."""
    classes = type(trainer).__mro__
    for position, kind in enumerate(classes):
        if is_known(kind) or kind is object:  # whose methods may have been replaced, too
            patched = (name for name, value in vars(kind).items() if inspect.isfunction(value) and not is_known(value))
            yield from (name for name in patched if name not in _OUTSIDE_STEPS)
            continue
        for name in vars(kind):
            inherited = any(is_known(base) and name in vars(base) for base in classes[position:])
            special = name.startswith("__") and name != "__call__"
            if inherited and not special and name not in _OUTSIDE_STEPS:
                yield name
    for name, value in vars(trainer).items():
        replaces = inspect.isroutine(getattr(type(trainer), name, None)) and name not in _OUTSIDE_STEPS
        if replaces and not is_known(value):
            yield name


def defined_by_user(kind: type, name: str) -> bool:
    """True if a class of a user's defines a method, above or below MemoryTrainerMixin."""
    return any(name in vars(base) and not is_known(base) for base in kind.__mro__ if base is not object)


def _own_model(model: torch.nn.Module) -> str:
    """The module, forward or forward hook of a model that is a user's own; "" where none is."""
    checked: set[type] = set()
    for name, module in model.named_modules():
        kind, label = type(module), name or "the model"
        forward = getattr(kind, "forward", kind)  # a module of torch.jit's has none
        if kind not in checked and not (is_known(kind) and is_known(forward)):
            return f"{label} is your own {kind.__name__}"
        checked.add(kind)
        if "forward" in vars(module) and not is_known(vars(module)["forward"]):
            return f"{label} has a forward of your own"
        if hook := _own_hook(vars(module), _FORWARD_HOOKS):
            return f"{label} has a forward hook of your own ({hook})"
    if hook := _own_hook(vars(torch.nn.modules.module), ("_global_forward_hooks", "_global_forward_pre_hooks")):
        return f"all modules have a forward hook of your own ({hook})"
    function = getattr(model, "_loss_function", None)
    return "" if function is None or is_known(function) else "the model's loss_function is your own"


def _own_backward(trainer: "MemoryTrainer") -> str:
    """The user's own code that backward runs, which would see the gradients of chunks; "" where there is none."""
    if not is_known(trainer.accelerator.backward):
        return "accelerator.backward is your own"
    if trainer.model is None:
        return ""
    for name, module in trainer.model.named_modules():
        if hook := _own_hook(vars(module), _BACKWARD_HOOKS):
            return f"{name or 'the model'} has a backward hook of your own ({hook})"
    for name, weight in trainer.model.named_parameters():
        for hooks in (weight._backward_hooks, getattr(weight, "_post_accumulate_grad_hooks", None)):
            if hook := _own_hook({"hooks": hooks}, ("hooks",)):
                return f"{name} has a gradient hook of your own ({hook})"
    return ""


def _own_hook(holder, names: tuple[str, ...]) -> str:
    hooks = (hook for name in names for hook in (holder.get(name) or {}).values())
    own = next((hook for hook in hooks if not is_known(hook)), None)
    return "" if own is None else getattr(own, "__qualname__", type(own).__qualname__)
