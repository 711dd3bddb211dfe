"""estimate_trainer(): the peak of a Trainer that stands ready to train."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from hf_memopt.data.lengths import relative_sizes, sample_lengths
from hf_memopt.errors import InputError
from hf_memopt.estimator.api import (
    bound_by_groups,
    checkpointing_period,
    engine_of,
    evaluates,
    fewest_layers,
    fields_of_trainer,
    missing_layers,
    neediest_rank,
    report,
    traceable,
    traced,
)
from hf_memopt.estimator.patches.flex_attention import runs_flex
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.tracing.adapters import adapts_layers_alike
from hf_memopt.estimator.tracing.extrapolate import at_full_depth, layers_of, shallow_depths
from hf_memopt.estimator.tracing.fake_copy import fake_copy
from hf_memopt.estimator.tracing.trace import TracedJob, repeated_layers
from hf_memopt.hardware import Hardware, get_hardware
from hf_memopt.levers.token_budget import samples_within
from hf_memopt.video.inputs import values_of
from hf_memopt.video.model_parts import frozen_parts

_ROWS_LOOKED_AT = 10_000


@dataclass(frozen=True)
class TrainerJob:
    """A Trainer's job, as far as memory is concerned (the fields are those of prediction.Job)."""

    config: Any
    fields: dict[str, Any]
    device: Hardware
    quantization: Any
    world_size: int
    engine: str
    batch: dict
    model: Any
    layer: Any
    task: str = "the trainer's own"
    memory_args: Any = None
    video: Any = None
    frozen: tuple[str, ...] = ()

    def trained_sizes(self) -> list[int]:
        """Elements of every tensor that is trained, in the model's order."""
        weights = (weight for weight in self.model.parameters() if weight.requires_grad)
        return [getattr(weight, "ds_numel", weight.numel()) for weight in weights]

    def elements(self, trained: bool = False) -> tuple[int, int]:
        """Weights outside and within one layer; only those that are trained."""

        def count(module) -> int:
            weights = [weight for weight in module.parameters() if weight.requires_grad or not trained]
            return sum(
                getattr(weight, "ds_numel", weight.numel()) for weight in weights
            )  # ZeRO-3 leaves none in place

        layer = max(1, count(self.layer))
        return count(self.model) - layer * layers_of(self.config), layer


def estimate_trainer(
    trainer, hardware: str | Hardware = "auto", world_size: int | None = None, strategy: str | None = None
) -> Estimate:
    """Predict the peak memory of `trainer.train()`, for any Trainer or subclass, which stays as it is.

    A copy of the trainer, with its class, arguments, optimizer and collator, trains a fake copy of its model on the
    largest batch that its data set gives. Its callbacks are left out: they may write or send.

    Args:
        trainer: a transformers.Trainer that has not been trained yet.
        hardware: a name in the catalog.
        world_size, strategy: as in estimate(); by default those of the trainer's arguments.

    Raises:
        InputError: the trainer has no model or no data, or is of a kind that is not modelled.
    """
    device = hardware if isinstance(hardware, Hardware) else get_hardware(hardware)
    model, args = trainer.model, trainer.args
    if model is None or not hasattr(model, "config"):
        raise InputError("trainer.model must be a transformers or peft model")
    if getattr(model, "is_distributed_loading_by_transformers", False):
        raise InputError("trainer.model is cut up already: estimate its configuration, with strategy=hsdpN or tpN")
    fields = fields_of_trainer(trainer)
    world_size = world_size or args.world_size
    tensors, padded = _largest_batch(trainer)
    batch = {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}
    sees = any(name.startswith("pixel_values") for name in tensors)  # such models ask what their inputs hold
    lists = _layer_lists(model)
    layer = lists[0][0] if lists else model
    job = TrainerJob(
        model.config,
        fields,
        device,
        getattr(model.config, "quantization_config", None),
        world_size,
        engine_of(fields, strategy, world_size),
        batch,
        model,
        layer,
        memory_args=getattr(trainer, "memory_args", None),
        video=sees or None,
        frozen=frozen_parts(model) if sees else (),
    )
    kept_batches = _batches_kept_for_metrics(trainer)

    def at(depth: int) -> TracedJob:
        return TracedJob(
            make_model=lambda: fake_copy(model, lists, depth),
            fields=traceable(fields, job.engine),
            batch=batch,
            accelerator=device.backend != "cpu",
            host_apart=device.memory_apart,
            flex=runs_flex(device),
            padded=padded,
            world_size=world_size,
            engine=job.engine,
            evaluated=evaluates(fields) and trainer.eval_dataset is not None,
            kept_logits=kept_batches,
            trainer=trainer,
            values=values_of(tensors) if sees else {},
            rank=neediest_rank(fields, job.engine, world_size),
        )

    whole = (layers_of(model.config),)
    period = checkpointing_period(fields, getattr(trainer, "memory_args", None))
    adapters = getattr(model, "peft_config", None) or {}
    alike = all(adapts_layers_alike(config, layers_of(model.config)) for config in adapters.values())
    depths = shallow_depths(model.config, fewest_layers(job), period) if lists and alike else whole
    books = []

    def peaks_at(depth: int):
        books.append(traced(at(depth)))
        return books[-1].peaks

    peaks = at_full_depth(model.config, peaks_at, depths)
    bound_by_groups(peaks, books[-1], job, depths[-1])
    return report(job, peaks, books[-1], *missing_layers(model.config, depths), max(0, kept_batches - 2))


def _layer_lists(model) -> list[torch.nn.ModuleList]:
    """The ModuleLists that hold the repeated layers; none where they are not as many as the configuration says."""
    stacks = [{id(layer) for layer in stack} for stack in repeated_layers(model)]
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    found = [module for module in lists if {id(layer) for layer in module} in stacks]
    return found if all(len(module) == layers_of(model.config) for module in found) else []


def _largest_batch(trainer) -> tuple[dict, bool]:
    """The tensors of the micro-batch with the longest samples, and whether it is not of one piece."""
    if trainer.train_dataset is None:
        raise InputError("trainer.train_dataset is None: the estimate needs samples to know the batch's size")
    loader = trainer.get_train_dataloader()
    trainer.accelerator._dataloaders.clear()
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
    places = tensors.get("position_ids")
    packed = places is not None and bool((places.diff(dim=-1) < 0).any())  # rows that attention keeps apart
    padded = packed or (mask is not None and not bool(mask.all()))
    return tensors, padded


def _longest(data, count: int) -> list[int]:
    """Indices of the samples that take most."""
    sizes = relative_sizes(data, _ROWS_LOOKED_AT)
    order = sorted(range(min(len(sizes), _ROWS_LOOKED_AT)), key=sizes.__getitem__, reverse=True)
    return (order * math.ceil(count / max(1, len(order))))[:count]


def _batches_kept_for_metrics(trainer) -> int:
    """Evaluation batches whose logits wait on the device for compute_metrics; 0 where none do."""
    if trainer.compute_metrics is None or trainer.args.prediction_loss_only or trainer.eval_dataset is None:
        return 0
    reduced = getattr(getattr(trainer, "memory_args", None), "reduce_eval_logits", False)
    if reduced and trainer.preprocess_logits_for_metrics is None:
        return 0  # only the likeliest tokens are kept
    size = trainer.args.per_device_eval_batch_size
    batches = math.ceil(len(trainer.eval_dataset) / size) if hasattr(trainer.eval_dataset, "__len__") else 1
    return max(1, min(batches, trainer.args.eval_accumulation_steps or batches))
