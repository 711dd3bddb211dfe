"""MemoryTrainer: a transformers Trainer that memory does not end."""

import contextlib
import logging
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from hf_memopt.data.lengths import sample_lengths
from hf_memopt.data.positions import with_positions
from hf_memopt.disk import claimed
from hf_memopt.errors import InputError
from hf_memopt.estimator.training_fields import read_trainer_fields
from hf_memopt.levers.apply import apply_levers, apply_to_trainer
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.refusals import check_levers
from hf_memopt.levers.sliding_window import has_window
from hf_memopt.levers.token_budget import TokenBudgetBatches
from hf_memopt.monitor.callback import MemoryCallback, append
from hf_memopt.monitor.readers import Reader
from hf_memopt.monitor.snapshots import SnapshotCallback
from hf_memopt.oom.classify import diagnose
from hf_memopt.oom.events import describe_event
from hf_memopt.trainer.batch_limit import BatchLimit
from hf_memopt.trainer.checkpoints import SafeCheckpoints
from hf_memopt.trainer.combination import check_combination, check_given, check_start
from hf_memopt.trainer.distributed import Peers
from hf_memopt.trainer.ending import Ending, worker_death
from hf_memopt.trainer.evaluation import EvalRecovery
from hf_memopt.trainer.interrupt import interruptible
from hf_memopt.trainer.pressure import Pressure
from hf_memopt.trainer.probe import probe
from hf_memopt.trainer.process import settings_of_run
from hf_memopt.trainer.recoverability import recoverability
from hf_memopt.trainer.resumed import SafeResume
from hf_memopt.trainer.sample_order import batch_indices
from hf_memopt.trainer.sharded_states import states_saved_here
from hf_memopt.trainer.step import MicroBatch, StepRunner

logger = logging.getLogger(__name__)


class MemoryTrainerMixin(EvalRecovery, SafeResume, SafeCheckpoints):
    """Makes a Trainer subclass survive running out of memory: `class MyTrainer(MemoryTrainerMixin, SomeTrainer)`.

    Steps, schedule, optimizer, order of samples and effective batch stay those of an uninterrupted run; a micro-batch
    that does not fit runs in smaller chunks, whose gradients add up to its own. Dropout draws other masks for chunks
    than for the whole. Where the parts of a loss do not add up (contrastive losses, batch normalization, a router's
    auxiliary loss), a micro-batch is not split: the run ends with a diagnosis and a checkpoint.

    Attributes:
        memory_args: MemoryArguments.
        memory_events: what happened, oldest first: dicts with `event` and `step`.
        when_probed: called with the samples that ran at once, where the largest batch did not fit whole.
    """

    when_probed: Callable[[int], None] | None = None
    _runner: StepRunner | None = None
    _train_loader = None

    def __init__(self, *args, memory_args: MemoryArguments | None = None, **kwargs) -> None:
        """Args:
            memory_args: MemoryArguments; by default their defaults. Everything else is the Trainer's.

        Raises:
            InputError: auto_find_batch_size is set too: it would restart the schedule with a smaller effective batch;
                a memory argument, or a combination of optimizer, engine and method, does not work.
        """
        self.memory_args = memory_args or MemoryArguments()
        self.memory_events: list[dict[str, Any]] = []
        replaced = kwargs.get("optimizer_cls_and_kwargs") is not None or self.memory_args.adam_mini
        check_given(args, kwargs, replaced)  # or the Trainer would fail in its own words
        with states_saved_here(*args, **kwargs):
            super().__init__(*args, **kwargs)
        check_combination(self.model, self.args, self.accelerator.state, self.optimizer, replaced)
        if self.args.auto_find_batch_size:
            raise InputError(
                "auto_find_batch_size=True restarts the schedule and shrinks the effective batch: leave it out, "
                "MemoryTrainer recovers within the step"
            )
        if (processes := self.get_sp_size()) > 1:
            self._share_tokens(processes)
        self._apply_levers(self.model)
        apply_to_trainer(self, self.memory_args)
        self._peers = Peers(self.accelerator)
        self._compose()
        if self._recoverability.reason and self.memory_args.oom_recovery:
            logger.warning("micro-batches run whole: %s", self._recoverability.reason)
        self._callback = self._memory_callback()
        if self.memory_args.snapshot_steps or self.memory_args.snapshot_on_oom:
            self.add_callback(SnapshotCallback(self.memory_args.snapshot_steps, self.memory_args.snapshot_on_oom))

    def _compose(self) -> None:
        """Make the objects that own a trainer's steps and its end. A copy of a trainer needs its own."""
        self._pressure = Pressure(self, Reader(self.args.device))
        self._ending = Ending(self, self._peers)
        self._recoverability = recoverability(self)
        self._runner = StepRunner(self, self._recoverability, self._first_limit())

    # ---- where the samples of a batch lie: override both for batches of another layout

    def count_samples(self, inputs) -> int:
        """Samples in a micro-batch; by default its rows, half of them for TRL's pairs."""
        return self._recoverability.layout.count(inputs)

    def split_batch(self, inputs, start: int, stop: int) -> dict[str, Any]:
        """Samples `start` to before `stop` of a micro-batch.

        Raises:
            InputError: it cannot be told where a sample ends.
        """
        return self._recoverability.layout.chunk(inputs, start, stop)

    @property
    def limit(self) -> BatchLimit:
        """How many samples run at once."""
        return self._runner.limit

    @property
    def data_wait_share(self) -> float | None:
        """Share of the steps' time, but the first's, in which batches were waited for; None before the second step."""
        return self._callback.data_wait.share_of_run()

    def _apply_levers(self, model) -> None:
        """Put the levers on a model; a chunked loss smooths labels itself.

        Raises:
            InputError: a lever cannot work with the model, or with another setting.
        """
        plugin = self.args.deepspeed_plugin
        stage = plugin.zero_stage if plugin else 0
        check_levers(self.memory_args, read_trainer_fields(self), self._engine(), stage, self.args.device.type)
        if model is None:
            return
        apply_levers(model, self.memory_args, self.args.label_smoothing_factor)
        if self.memory_args.loss_chunk_size is not None:
            self.label_smoother = None

    def _engine(self) -> str:
        """none, ddp, fsdp2, mesh or deepspeed."""
        if self.is_distributed_loading_by_transformers:
            return "mesh"
        kind = self.accelerator.distributed_type.value
        return {"NO": "none", "DEEPSPEED": "deepspeed", "FSDP": "fsdp2"}.get(kind, "ddp")

    @property
    def batches(self) -> int:
        """Processes with a batch of their own: those of tensor and sequence parallelism share one."""
        return self.args.world_size // self.get_tp_size() // self.get_sp_size()

    def _share_tokens(self, processes: int) -> None:
        """Batches as Ulysses wants them.

        Raises:
            InputError: a lever that wants whole sequences.
        """
        names = ["loss_chunk_size", "logits_to_keep", "max_tokens_per_batch", "sparse_block_size"]
        if self.memory_args.sliding_window and not has_window(type(self.model.config.get_text_config())):
            names.append("sliding_window")
        for name in names:
            if getattr(self.memory_args, name):
                raise InputError(f"{name} wants whole sequences, which sequence parallelism shares: leave it out")
        self.data_collator = with_positions(self.data_collator, processes)

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        if self._runner is not None:  # made anew for training
            self._apply_levers(model)
        return model

    def _first_limit(self) -> BatchLimit:
        """Fetch micro-batches of max_batch_size and begin with chunks of the size that was asked for, so that chunks
        can grow; the effective batch stays.

        Raises:
            InputError: the effective batch cannot be made of such micro-batches, or they could not be split.
        """
        memory, args, largest = self.memory_args, self.args, self.memory_args.max_batch_size
        first, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        if largest is None or largest <= first:
            return BatchLimit(memory.adjustment_frequency, memory.min_batch_size)
        if not self._recoverability.splits:
            raise InputError(
                f"max_batch_size={largest} needs micro-batches that can be split ({self._recoverability.reason}): "
                "leave it out"
            )
        if first * accumulation % largest:
            raise InputError(
                f"max_batch_size={largest} does not divide the {first * accumulation} samples that a device takes in "
                f"a step (per_device_train_batch_size={first} × gradient_accumulation_steps={accumulation})"
            )
        args.per_device_train_batch_size = largest
        args.gradient_accumulation_steps = first * accumulation // largest
        self._train_batch_size = args.train_batch_size
        return BatchLimit(memory.adjustment_frequency, memory.min_batch_size, first)

    def _memory_callback(self) -> MemoryCallback:
        """The callback that logs memory: the user's own, or one before all others."""
        given = [found for found in self.callback_handler.callbacks if isinstance(found, MemoryCallback)]
        return given[0] if given else MemoryCallback(self.memory_args).attach(self)

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        check_start(self.args, self.accelerator.state)
        self._newest, self._runner.resume_states = None, {}  # nothing of an earlier call
        checkpoint = self._agree_on_checkpoint(self._checkpoint_to_resume(resume_from_checkpoint))
        own = claimed(self.args.output_dir) if self.args.process_index == 0 else contextlib.nullcontext()
        # The first of all: a step is finished, also where another callback fails at its end.
        self.callback_handler.callbacks.insert(0, self._ending.updates)
        try:
            with (
                own,
                settings_of_run(self),
                interruptible(self) as stop,
                self._peers.watching(self._ending.save_for_peer),
            ):
                try:
                    return super().train(checkpoint, *args, **kwargs)
                except Exception as error:
                    cause = worker_death(error)
                    if stop.signal is not None or not self._ending.explains(cause):
                        raise
                    found = diagnose(cause)
                    traceback.clear_frames(error.__traceback__)
                self._ending.elsewhere(found)
        finally:
            self.remove_callback(self._ending.updates)

    def get_train_dataloader(self):
        """Batches stay on the host until their micro-batch runs: the Trainer fetches a whole window of them."""
        loader = self._by_tokens() if self.memory_args.max_tokens_per_batch else super().get_train_dataloader()
        if getattr(loader, "device", None) is not None and self._runner.recovers:
            loader.device = None
        self._train_loader = loader
        return loader

    def _by_tokens(self):
        """Batches within a budget of tokens, otherwise the Trainer's data loader.

        Raises:
            InputError: a stream, or a sample that is longer than the budget.
        """
        data, budget = self.train_dataset, self.memory_args.max_tokens_per_batch
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            raise InputError(
                f"max_tokens_per_batch={budget} needs to know every length: a stream has none, leave it out"
            )
        args, collator = self.args, self.data_collator
        lengths = sample_lengths(data)
        if hasattr(data, "column_names"):
            data = self._remove_unused_columns(data, description="Training")
        else:
            collator = self._get_collator_with_removed_columns(collator, description="Training")
        seed = args.seed if args.data_seed is None else args.data_seed
        sampler = SeedableRandomSampler(data, data_seed=seed)
        batches = TokenBudgetBatches(sampler, lengths, budget, self.batches, seed)
        loader = torch.utils.data.DataLoader(
            data,
            batch_sampler=batches,
            collate_fn=collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            in_order=args.dataloader_in_order,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        )
        return self.accelerator.prepare(loader)

    # ---- steps

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        self._pressure.after_window(self._runner.window)
        self._runner.begin_window()
        self._agree_on_limit()
        try:
            return super().get_batch_samples(self._callback.data_wait.timed(epoch_iterator), *args, **kwargs)
        except Exception as error:
            if not self._ending.explains(error):
                raise
            found = diagnose(error)
            traceback.clear_frames(error.__traceback__)
        self._ending.elsewhere(found, "data")

    def training_step(self, model, inputs, num_items_in_batch=None):
        return self._runner.run(super().training_step, model, inputs, num_items_in_batch)

    def _clip_grad_norm(self, model):
        return self._runner.clip(super()._clip_grad_norm, model)

    def _prepare_for_training(self, *args, **kwargs):
        model, loader = super()._prepare_for_training(*args, **kwargs)
        self._runner.guard_optimizer()
        if self.memory_args.probe_worst_batch and self._runner.recovers:
            samples = probe(self, model, loader)
            if samples is not None and self.when_probed is not None:
                self.when_probed(samples)
        return model, loader

    def _agree_on_limit(self) -> None:
        """All processes take over the smallest limit before anything of a window runs."""
        if self.args.world_size > 1 and self._runner.recovers:
            self.limit.agree(self._peers.smallest(self.limit.elements))

    # ---- what the parts call

    def _event(self, name: str, **details: Any) -> None:
        """Remember something that happened, and say it loudly."""
        event = {"event": name, "step": self.state.global_step, "process": self.args.process_index, **details}
        self.memory_events.append(event)
        logger.warning("%s", describe_event(event))
        if name == "oom_recovered":
            self._ending.snapshot()
        if self.args.should_save:
            append(self.args.output_dir, event)

    def _dataset_indices(self, micro: MicroBatch) -> list[int] | None:
        """Positions in the data set of a micro-batch's samples; None where the sampler's order cannot be known."""
        per_epoch = len(self._train_loader) if hasattr(self._train_loader, "__len__") else 0
        if not per_epoch:
            return None
        accumulation = self.args.gradient_accumulation_steps
        windows = -(-per_epoch // accumulation)
        epoch, window = divmod(self.state.global_step, windows)
        return batch_indices(self._train_loader, epoch, window * accumulation + micro.number)


class MemoryTrainer(MemoryTrainerMixin, Trainer):
    """transformers.Trainer with MemoryTrainerMixin."""
