"""The job of a Trainer that is ready to train: its own model, its own data, its own class."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.data.lengths import relative_sizes, sample_lengths
from hf_memopt.errors import InputError
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.tracing.adapters import adapts_layers_alike
from hf_memopt.estimator.tracing.extrapolate import count_layers
from hf_memopt.estimator.tracing.fake_copy import fake_copy
from hf_memopt.estimator.tracing.segments import repeated_layers
from hf_memopt.estimator.tracing.trace import TracedJob
from hf_memopt.estimator.training_fields import (
    engine_name,
    evaluates,
    peak_rank,
    read_trainer_fields,
    with_strategy,
)
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.levers.token_budget import samples_within
from hf_memopt.video.inputs import VideoInputs, value_tensors
from hf_memopt.video.model_parts import frozen_parts

_SAMPLED_ROWS = 10_000  # rows among which the longest samples are searched


@dataclass(frozen=True, kw_only=True)
class TrainerJob(Job):
    """A Job whose model, batch and class are a Trainer's.

    Attributes:
        trainer: stays as it is; copies of it are traced.
        inputs: the tensors of its largest micro-batch.
        layer_lists: the ModuleLists of its model's repeated layers; empty where they are not recognised.
    """

    trainer: Any
    inputs: dict[str, torch.Tensor]
    layer_lists: list[torch.nn.ModuleList]

    @property
    def batch(self) -> dict:
        return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in self.inputs.items()}

    @property
    def kept_batches(self) -> int:
        trainer = self.trainer
        if trainer.compute_metrics is None or trainer.args.prediction_loss_only or trainer.eval_dataset is None:
            return 0
        reduced = getattr(self.memory_args, "reduce_eval_logits", False)
        if reduced and trainer.preprocess_logits_for_metrics is None:
            return 0  # only the predicted token ids are kept
        size = trainer.args.per_device_eval_batch_size
        batches = math.ceil(len(trainer.eval_dataset) / size) if hasattr(trainer.eval_dataset, "__len__") else 1
        return max(1, min(batches, trainer.args.eval_accumulation_steps or batches))

    def elements(self, trained: bool = False) -> tuple[int, int]:
        def count(module) -> int:
            return sum(map(_count_elements, _weights(module, trained)))

        layer = max(1, count(self.layer_lists[0][0] if self.layer_lists else self.trainer.model))
        return count(self.trainer.model) - layer * count_layers(self.config), layer

    def trained_sizes(self) -> list[int]:
        return [_count_elements(weight) for weight in _weights(self.trainer.model, trained=True)]

    def depths(self) -> tuple[int, ...]:
        layers = count_layers(self.config)
        adapters = getattr(self.trainer.model, "peft_config", None) or {}
        alike = all(adapts_layers_alike(adapter, layers) for adapter in adapters.values())
        return super().depths() if self.layer_lists and alike else (layers,)

    def at_depth(self, depth: int) -> TracedJob:
        return TracedJob(
            make_model=lambda: fake_copy(self.trainer.model, self.layer_lists, depth),
            batch=self.batch,
            values={} if self.video is None else value_tensors(self.inputs),
            padded=self.padded,
            evaluated=evaluates(self.fields) and self.trainer.eval_dataset is not None,
            kept_logits=self.kept_batches,
            trainer=self.trainer,
            **self._trace_settings(),
        )


def _weights(module: torch.nn.Module, trained: bool) -> list[torch.nn.Parameter]:
    return [weight for weight in module.parameters() if weight.requires_grad or not trained]


def _count_elements(weight: torch.Tensor) -> int:
    """Of the whole weight: under ZeRO-3 `numel()` is that of an empty placeholder."""
    return getattr(weight, "ds_numel", weight.numel())


def describe_trainer(trainer, hardware: str | Hardware, world_size: int | None, strategy: str | None) -> TrainerJob:
    """The job of a Trainer; the arguments are estimate_trainer()'s.

    Raises:
        InputError: the trainer has no model or no data, or is of a kind that is not modelled.
    """
    model = trainer.model
    if model is None or not hasattr(model, "config"):
        raise InputError("trainer.model must be a transformers or peft model")
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise InputError("trainer.model is sharded already: estimate its configuration, with strategy=hsdpN or tpN")
    fields = with_strategy(read_trainer_fields(trainer), strategy)
    world_size = world_size or trainer.args.world_size
    engine = engine_name(fields, strategy, world_size)
    inputs, padded = _largest_batch(trainer)
    # Vision models compute with the values of their inputs (grids of patches), text models with shapes alone.
    sees = any(name.startswith("pixel_values") for name in inputs)
    return TrainerJob(
        config=model.config,
        task="the trainer's own",
        quantization_config=getattr(model.config, "quantization_config", None),
        memory_args=getattr(trainer, "memory_args", None),
        frozen=frozen_parts(model) if sees else (),
        fields=fields,
        seq_len=max((tensor.shape[1] for tensor in inputs.values() if tensor.dim() == 2), default=1),
        device=hardware if isinstance(hardware, Hardware) else get_hardware(hardware),
        padded=padded,
        video=VideoInputs(sample=inputs) if sees else None,
        engine=engine,
        world_size=world_size,
        rank=peak_rank(fields, engine, world_size),
        trainer=trainer,
        inputs=inputs,
        layer_lists=_layer_lists(model),
    )


def _layer_lists(model) -> list[torch.nn.ModuleList]:
    """The ModuleLists of the repeated layers; none where their number is not the configuration's."""
    stacks = [{id(layer) for layer in stack} for stack in repeated_layers(model)]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    layers = [module for module in lists if {id(layer) for layer in module} in stacks]
    return layers if all(len(module) == count_layers(model.config) for module in layers) else []


def _largest_batch(trainer) -> tuple[dict, bool]:
    """The tensors of the micro-batch with the longest samples, and whether it is padded or packed."""
    if trainer.train_dataset is None:
        raise InputError("trainer.train_dataset is None: the estimate needs samples to know the batch's size")
    loader = trainer.get_train_dataloader()
    trainer.accelerator._dataloaders.clear()  # accelerate keeps every loader that it prepared, to save their states
    micro = trainer.args.per_device_train_batch_size
    data = loader.dataset
    if hasattr(data, "__len__") and hasattr(data, "__getitem__"):
        budget = getattr(getattr(trainer, "memory_args", None), "max_tokens_per_batch", None)
        if budget is not None:
            micro = samples_within(budget, max(sample_lengths(data)))
        rows = [data[index] for index in _longest(data, micro)]
        batch = loader.collate_fn(rows)
    else:
        batch = next(iter(loader), None)
    batch = trainer.joined(batch) if hasattr(trainer, "joined") else batch
    tensors = {name: value for name, value in dict(batch or {}).items() if isinstance(value, torch.Tensor)}
    if not tensors:
        raise InputError("the trainer's collator returns no tensors for its longest samples")
    mask = tensors.get("attention_mask")
    positions = tensors.get("position_ids")
    packed = positions is not None and bool((positions.diff(dim=-1) < 0).any())  # they start again at each row
    padded = packed or (mask is not None and not bool(mask.all()))
    return tensors, padded


def _longest(data, count: int) -> list[int]:
    """Indices of the longest samples, repeated where there are fewer."""
    sizes = relative_sizes(data, _SAMPLED_ROWS)
    order = sorted(range(min(len(sizes), _SAMPLED_ROWS)), key=sizes.__getitem__, reverse=True)
    return (order * math.ceil(count / max(1, len(order))))[:count]
