"""The Trainer that is traced: transformers' own, or a copy of the user's with its class and settings."""

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hf_memopt.estimator.accounting.known_values import is_worth_knowing, set_value
from hf_memopt.estimator.accounting.ledger import HOST, Ledger
from hf_memopt.estimator.tracing.rollouts import follow_rollouts, generates
from hf_memopt.levers.apply import apply_to_trainer


def make_trainer(job, model, args, ledger: Ledger):
    """A Trainer over fake batches, or a copy of the user's own with its class and settings.

    Args:
        job: a trace.TracedJob.
        args: as traced_arguments.make_arguments() returns them.
    """
    from transformers import PrinterCallback, Trainer

    # accelerate's loader holds the next batch already, on a CPU in the same memory.
    batches = args.gradient_accumulation_steps * args.max_steps + (not job.accelerator)
    # Rows without content: the collator creates the tensors.
    data = range(args.per_device_train_batch_size * batches * job.world_size)
    if job.trainer is None:
        trainer = Trainer(model=model, args=args, train_dataset=data, data_collator=make_collator(job))
        trainer.remove_callback(PrinterCallback)
    else:
        trainer = job.trainer.copy_trainer(model, args)
        trainer.train_dataset, trainer.data_collator = data, make_collator(job)
        if generates(trainer):
            follow_rollouts(trainer, ledger, job.fields["gradient_accumulation_steps"])

    def load():  # as Trainer.get_train_dataloader, in order: random places would ask for values
        loader = torch.utils.data.DataLoader(data, args.train_batch_size, collate_fn=trainer.data_collator)
        return trainer.accelerator.prepare(loader)

    trainer.get_train_dataloader = load
    memory_args = getattr(trainer, "memory_args", job.memory_args)
    if memory_args is not None:
        apply_to_trainer(
            trainer,
            memory_args,
            has_discrete_memory=lambda _: job.discrete_memory,
            counting=functools.partial(ledger.counting_as, HOST),
        )
    by_engine = job.engine.fsdp_version and job.engine.offloads  # follow_engine() knows DeepSpeed's
    trainer.steps_on_host = job.discrete_memory and (by_engine or getattr(memory_args, "optimizer_cpu_offload", False))
    return trainer


def make_collator(job):
    """A collator that returns the TracedJob's micro-batch, whatever the rows."""
    if job.inputs is not None:
        from accelerate.utils import recursively_apply

        return lambda rows: recursively_apply(_fake, job.inputs)

    def collate(rows):
        batch = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in job.batch.items()}
        for name, value in job.values.items():
            set_value(batch[name], value)
        if "shift_labels" in batch:  # as transformers' deepspeed_sp_compute_loss() passes them
            batch["labels"] = batch["shift_labels"]
        return batch

    return collate


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """A fake tensor that knows its value; to be made under the fake tensor mode."""
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    if not is_worth_knowing(tensor):
        return fake
    with _disable_current_modes():  # a copy: what the model changes in place must not change the next batch
        value = tensor.detach().cpu().clone()
    return set_value(fake, value)
