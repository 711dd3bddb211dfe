"""The Trainer that is traced: transformers' own, or a copy of the user's with its class and settings."""

import copy
import dataclasses
import functools

import torch

from hf_memopt.estimator.accounting.known_values import set_value
from hf_memopt.estimator.accounting.ledger import HOST, Ledger
from hf_memopt.levers.apply import apply_levers, apply_to_trainer


class _Rows(torch.utils.data.Dataset):
    """Rows without content: the collator creates the tensors."""

    def __init__(self, length: int):
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def make_trainer(job, model, args, ledger: Ledger):
    """A Trainer over fake batches, or a copy of the user's own with its class and settings.

    Args:
        job: a trace.TracedJob.
        args: as traced_arguments.make_arguments() returns them.
    """
    from transformers import PrinterCallback, Trainer

    micro = args.per_device_train_batch_size
    batches = args.gradient_accumulation_steps * args.max_steps
    if not job.accelerator:  # accelerate's loader holds the next batch already, on a CPU in the same memory
        batches += 1
    data = _Rows(micro * batches * job.world_size)
    if job.trainer is None:
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=make_collator(job))
        trainer.remove_callback(PrinterCallback)
    else:
        trainer = _copy_trainer(job.trainer, model, args)
        trainer.train_dataset, trainer.data_collator = data, make_collator(job)
        trainer.get_train_dataloader = lambda: Trainer.get_train_dataloader(trainer)
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(data)
    memory_args = getattr(trainer, "memory_args", job.memory_args)
    if memory_args is not None:
        host = {"is_apart": lambda _: job.host_apart, "booking": functools.partial(ledger.booking, HOST)}
        apply_to_trainer(trainer, memory_args, **host)
    trainer.steps_on_host = job.host_apart and getattr(memory_args, "optimizer_cpu_offload", False)
    return trainer


def make_collator(job):
    """A collator that returns the TracedJob's micro-batch, whatever the rows."""

    def collate(rows):
        batch = {name: torch.ones(shape, dtype=dtype) for name, (shape, dtype) in job.batch.items()}
        for name, value in job.values.items():
            set_value(batch[name], value)
        return batch

    return collate


def _copy_trainer(original, model, args):
    """The user's trainer around another model, without its callbacks, which may write files or send logs."""
    from transformers import TrainerControl, TrainerState
    from transformers.trainer_callback import CallbackHandler

    trainer = copy.copy(original)
    trainer.model = trainer.model_wrapped = model
    trainer.args, trainer.state, trainer.control = args, TrainerState(), TrainerControl()
    trainer.eval_dataset = trainer.compute_metrics = trainer.lr_scheduler = None
    trainer.is_in_train = False
    if hasattr(trainer, "memory_args"):  # a MemoryTrainer: fake tensors never run out of memory
        off = {"oom_recovery": False, "probe_worst_batch": False, "max_memory_gib": None, "max_batch_size": None}
        vars(trainer).pop("create_optimizer", None)
        trainer.memory_args = dataclasses.replace(trainer.memory_args, **off)
        trainer._compose()
        apply_levers(model, trainer.memory_args, original.args.label_smoothing_factor)
    trainer.place_model_on_device = False
    trainer.create_accelerator_and_postprocess()
    trainer.optimizer = _copy_optimizer(original, model)
    trainer.callback_handler = CallbackHandler([], model, trainer.processing_class, trainer.optimizer, None)
    return trainer


def _copy_optimizer(original, model):
    """The optimizer that the user passed, over another model's weights; None where the Trainer creates its own."""
    if original.optimizer is None or original.optimizer.state:
        return None
    names = {id(weight): name for name, weight in original.model.named_parameters()}
    weights = dict(model.named_parameters())
    groups = []
    for group in original.optimizer.param_groups:
        group_names = [names[id(weight)] for weight in group["params"]]
        # A shallow copy lacks the weights of the layers that it leaves out.
        groups.append({**group, "params": [weights[name] for name in group_names if name in weights]})
    return type(original.optimizer)(groups, **original.optimizer.defaults)
