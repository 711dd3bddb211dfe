"""A copy of a user's Trainer around fake copies of all models that it holds; the original stays as it is."""

import collections
import copy
import dataclasses
import functools
import types
from typing import Any

import torch

from hf_memopt.estimator.private_names import Part
from hf_memopt.estimator.tracing.fake_copy import Memo, fake_copy, fake_tensor, rebind
from hf_memopt.estimator.tracing.segments import repeated_layers
from hf_memopt.levers.apply import apply_levers

_USED = Part.EVERY_JOB.relies_on(
    "transformers:Trainer.create_accelerator_and_postprocess(self)",
    why="a copy of the user's Trainer gets an accelerator of its own",
    until="Trainer has a public hook for it",
)
# Attributes of transformers' Trainer that the copy gets otherwise, or shares because they do not change.
_NOT_COPIED = {
    "model",
    "model_wrapped",
    "model_init",
    "args",
    "state",
    "control",
    "accelerator",
    "callback_handler",
    "optimizer",
    "lr_scheduler",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "hp_search_backend",
    "vllm_generation",  # TRL's, with an engine of vLLM that holds weights of its own
}
# Packages whose objects are shared: they hold no models, or models that the Trainer holds too.
_SHARED = {"torch", "transformers", "accelerate", "datasets", "tokenizers", "peft", "deepspeed", "numpy", "builtins"}
_CONTAINERS = (list, dict, set, collections.deque)


class TrainerCopy:
    """Copies of a Trainer and of its models, with fewer layers; to be made under the fake tensor mode.

    Attributes:
        original: the user's.
        held: copies of the models that it holds beside the trained one: reference, teacher, reward.

    Args:
        layer_lists: the ModuleLists of the trained model's repeated layers.
        depth: layers that each of them keeps.
    """

    def __init__(self, original, layer_lists: list[torch.nn.ModuleList], depth: int):
        self.original = original
        self.held: list[torch.nn.Module] = []
        self._layer_lists, self._depth = layer_lists, depth
        self._memo: Memo = {}
        self._attributes: dict[str, Any] = {}
        self._trainer = copy.copy(original)

    def copy_models(self) -> torch.nn.Module:
        """Copy all that the Trainer holds.

        Returns:
            The copy of the trained model.
        """
        self._memo[id(self.original)] = self._trainer
        model = fake_copy(self.original.model, self._layer_lists, self._depth, self._memo)
        for name, value in (_class_containers(self.original) | vars(self.original)).items():
            if name not in _NOT_COPIED:
                self._attributes[name] = self._copy(value)
        return model

    def copy_trainer(self, model, args):
        """The Trainer around copy_models()'s model, without its callbacks, which may write files or send logs."""
        from transformers import TrainerControl, TrainerState
        from transformers.trainer_callback import CallbackHandler

        trainer, original = self._trainer, self.original
        vars(trainer).update(self._attributes)
        trainer.model = trainer.model_wrapped = model
        trainer.args, trainer.state, trainer.control = args, TrainerState(), TrainerControl()
        trainer.eval_dataset = trainer.compute_metrics = trainer.lr_scheduler = None
        trainer.model_init = None  # train() would make the model anew
        trainer.is_in_train = False
        if hasattr(trainer, "memory_args"):  # a MemoryTrainer: fake tensors never run out of memory
            off = {"oom_recovery": False, "probe_worst_batch": False, "max_memory_gib": None, "max_batch_size": None}
            vars(trainer).pop("create_optimizer", None)
            trainer.memory_args = dataclasses.replace(trainer.memory_args, **off)
            trainer._compose()
            apply_levers(model, trainer.memory_args, original.args.label_smoothing_factor)
        trainer.place_model_on_device = False
        trainer.create_accelerator_and_postprocess()
        trainer.optimizer = self._copy_optimizer()
        trainer.callback_handler = CallbackHandler([], model, trainer.processing_class, trainer.optimizer, None)
        return trainer

    def forget_weights(self) -> None:
        """Let go of the trained model's whole weights, once shards have taken their place."""
        for weight in self.original.model.parameters():
            self._memo.pop(id(weight), None)

    def _copy(self, value):
        """Return what the copy holds in a value's place."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, torch.nn.Module):
            return self._copy_module(value)
        if isinstance(value, torch.Tensor):
            copied = fake_tensor(value)
        elif isinstance(value, tuple):
            parts = [self._copy(part) for part in value]
            same = all(part is own for part, own in zip(parts, value, strict=True))
            copied = value if same else tuple.__new__(type(value), parts)  # constructors take what they like
        elif isinstance(value, _CONTAINERS):
            return self._copy_container(value)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            copied = rebind(value, self._memo)
        else:
            return self._copy_object(value) if _is_users_own(value) else value
        self._memo[id(value)] = copied
        return copied

    def _copy_object(self, value):
        """A copy of a user's object; itself where it has none: open files, and what is one of its kind (a logger)."""
        try:
            copied = copy.copy(value)
        except Exception:  # a class raises what it likes where it cannot be copied
            copied = value
        self._memo[id(value)] = copied
        if copied is not value:
            vars(copied).update({name: self._copy(part) for name, part in vars(value).items()})
        return copied

    def _copy_container(self, value):
        copied = self._memo[id(value)] = copy.copy(value)
        copied.clear()
        if isinstance(value, dict):
            copied.update({key: self._copy(part) for key, part in value.items()})
        elif isinstance(value, set):
            copied.update(value)
        else:
            copied.extend(self._copy(part) for part in value)
        return copied

    def _copy_module(self, module: torch.nn.Module) -> torch.nn.Module:
        depths = {len(layers) for layers in self._layer_lists}  # one, which a model beside the trained one may share
        lists = [layers for layers in repeated_layers(module) if len(layers) in depths] if depths else []
        copied = fake_copy(module, lists, self._depth, self._memo)
        self.held.append(copied)
        return copied

    def _copy_optimizer(self):
        """The optimizer that the user passed, over the copies' weights; None where the Trainer creates its own."""
        optimizer = self.original.optimizer
        if optimizer is None or optimizer.state:
            return None
        present = {id(weight) for model in (self._trainer.model, *self.held) for weight in model.parameters()}
        groups = []
        for group in optimizer.param_groups:
            # A shallow copy lacks the weights of the layers that it leaves out.
            weights = [self._memo[id(weight)] for weight in group["params"] if id(weight) in self._memo]
            groups.append({**group, "params": [weight for weight in weights if id(weight) in present]})
        copied = object.__new__(type(optimizer))  # its constructor may take other arguments than its defaults
        # Without methods that schedulers wrapped (torch's track_step_called): those step the original.
        own = {name: value for name, value in vars(optimizer).items() if not callable(value)}
        vars(copied).update(own, param_groups=groups, state=collections.defaultdict(dict))
        return copied


def _class_containers(trainer) -> dict[str, Any]:
    """Lists and dicts in the bodies of a Trainer's own classes, which its methods may append to."""
    from transformers import Trainer

    kinds = [kind for kind in reversed(type(trainer).__mro__) if issubclass(kind, Trainer) and kind is not Trainer]
    return {
        name: value
        for kind in kinds
        for name, value in vars(kind).items()
        if isinstance(value, _CONTAINERS) and not name.startswith("__")
    }


def _is_users_own(value) -> bool:
    """True if a value is an object of a class that no library of _SHARED defines."""
    module = type(value).__module__.split(".")[0]
    return hasattr(value, "__dict__") and module not in _SHARED and not isinstance(value, type | types.ModuleType)
