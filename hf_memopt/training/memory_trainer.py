"""MemoryTrainer: a transformers Trainer that memory does not end."""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import SeedableRandomSampler
from transformers import Trainer

from hf_memopt.data.lengths import sample_lengths
from hf_memopt.data.positions import with_positions
from hf_memopt.errors import InputError
from hf_memopt.estimator.prediction import fields_of_trainer
from hf_memopt.files import write_whole
from hf_memopt.levers.apply import apply_levers, apply_to_trainer
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.refusals import check_levers
from hf_memopt.levers.token_budget import TokenBudgetBatches
from hf_memopt.monitor.callback import MemoryCallback, append
from hf_memopt.monitor.readers import Reader, limit_process
from hf_memopt.monitor.snapshots import SnapshotCallback
from hf_memopt.reports.events import told
from hf_memopt.training.batch_limit import BatchLimit
from hf_memopt.training.eval_recovery import EvalRecovery
from hf_memopt.training.exhausted import TrainingOutOfMemory
from hf_memopt.training.mesh_states import states_saved_here
from hf_memopt.training.oom import Diagnosis, free_memory
from hf_memopt.training.oom_report import oom_report
from hf_memopt.training.peers import Peers
from hf_memopt.training.pieces import shapes_of, tokens_of
from hf_memopt.training.probe import probe
from hf_memopt.training.safe_checkpoints import SafeCheckpoints
from hf_memopt.training.sample_order import batch_indices
from hf_memopt.training.step_recovery import StepRecovery, Window

logger = logging.getLogger(__name__)


class MemoryTrainerMixin(StepRecovery, EvalRecovery, SafeCheckpoints):
    """Makes a Trainer subclass survive running out of memory: `class MyTrainer(MemoryTrainerMixin, SomeTrainer)`.

    Steps, schedule, optimizer, order of samples and effective batch stay those of an uninterrupted run; a micro-batch
    that does not fit runs in smaller pieces, whose gradients add up to its own. What is a mean over a micro-batch but
    not of its labels or samples (batch normalization, a router's balance, a contrastive loss) is one over each piece.

    Attributes:
        memory_args: MemoryArguments.
        memory_events: what happened, oldest first: dicts with `event` and `step`.
        when_probed: called with the samples that ran at once, where the largest batch did not fit whole.
    """

    when_probed: Callable[[int], None] | None = None

    def __init__(self, *args, memory_args: MemoryArguments | None = None, **kwargs) -> None:
        """Args:
            memory_args: MemoryArguments; by default their defaults. Everything else is the Trainer's.

        Raises:
            InputError: auto_find_batch_size is set too: it would restart the schedule with a smaller effective batch.
        """
        self.memory_args = memory_args or MemoryArguments()
        self.memory_events: list[dict[str, Any]] = []
        self.limit = BatchLimit(self.memory_args.adjustment_frequency, self.memory_args.min_batch_size)
        self._window, self._running = Window(), (None, 0)
        self._stage, self._share = "start", 1.0
        self._loss_is_a_sum: bool | None = None
        with states_saved_here(*args, **kwargs):
            super().__init__(*args, **kwargs)
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
        self._memory = Reader(self.args.device)
        self._near_peak = self._resting = 0
        self._largest: int | None = None  # tensor elements of the largest micro-batch that was run
        self._grow_up_to(self.memory_args.max_batch_size)
        self._callback = self._memory_callback()
        if self.memory_args.snapshot_steps or self.memory_args.snapshot_on_oom:
            self.add_callback(SnapshotCallback(self.memory_args.snapshot_steps, self.memory_args.snapshot_on_oom))

    def _apply_levers(self, model) -> None:
        """Put the levers on a model; a chunked loss smooths labels itself.

        Raises:
            InputError: a lever cannot work with the model, or with another setting.
        """
        plugin = self.args.deepspeed_plugin
        check_levers(self.memory_args, fields_of_trainer(self), self._engine(), plugin.zero_stage if plugin else 0)
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
        for name in ("loss_chunk_size", "logits_to_keep", "max_tokens_per_batch"):
            if getattr(self.memory_args, name):
                raise InputError(f"{name} wants whole sequences, which sequence parallelism shares: leave it out")
        self.data_collator = with_positions(self.data_collator, processes)

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        if hasattr(self, "_peers"):  # made anew for training
            self._apply_levers(model)
        return model

    def _grow_up_to(self, largest: int | None) -> None:
        """Fetch micro-batches of the largest size that is allowed, and begin with pieces of the size that was asked
        for; the effective batch stays.

        Raises:
            InputError: the effective batch cannot be made of micro-batches of that size.
        """
        first, accumulation = self.args.per_device_train_batch_size, self.args.gradient_accumulation_steps
        if largest is None or largest <= first:
            return
        if first * accumulation % largest:
            raise InputError(
                f"max_batch_size={largest} does not divide the {first * accumulation} samples that a device takes in "
                f"a step (per_device_train_batch_size={first} × gradient_accumulation_steps={accumulation})"
            )
        self.args.per_device_train_batch_size = largest
        self.args.gradient_accumulation_steps = first * accumulation // largest
        self._train_batch_size = self.args.train_batch_size
        memory = self.memory_args
        self.limit = BatchLimit(memory.adjustment_frequency, memory.min_batch_size, first)

    def _memory_callback(self) -> MemoryCallback:
        """The callback that logs memory: the user's own, or one before all others."""
        given = [found for found in self.callback_handler.callbacks if isinstance(found, MemoryCallback)]
        return given[0] if given else MemoryCallback(self.memory_args).attach(self)

    def train(self, *args, **kwargs):
        limit = self.memory_args.max_memory_gib
        if limit is not None and not limit_process(self.args.device, limit):
            logger.warning("max_memory_gib=%s: a CPU's allocator cannot be limited; thresholds follow it", limit)
        try:
            with self._peers.watching(self._save_for_others):
                return super().train(*args, **kwargs)
        except TrainingOutOfMemory as end:
            self._say(end)
            if not self._peers.alone:
                self._peers.leave("its own memory ran out")
            raise
        except Exception:
            if not self._peers.alone and (said := self._peers.ended()):
                self._peers.leave(said["message"])
            raise

    def get_train_dataloader(self):
        """Batches stay on the host until their micro-batch runs: the Trainer fetches a whole window of them."""
        loader = self._by_tokens() if self.memory_args.max_tokens_per_batch else super().get_train_dataloader()
        if getattr(loader, "device", None) is not None and self._recovers():
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
        batches = TokenBudgetBatches(sampler, lengths, budget, self.batches)
        loader = torch.utils.data.DataLoader(
            data, batch_sampler=batches, collate_fn=collator, num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory, persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=args.dataloader_multiprocessing_context,
        )  # fmt: skip
        return self.accelerator.prepare(loader)

    # ---- what the parts call

    def _event(self, name: str, **details: Any) -> None:
        """Remember something that happened, and say it loudly."""
        event = {"event": name, "step": self.state.global_step, "process": self.args.process_index, **details}
        self.memory_events.append(event)
        logger.warning("%s", told(event))
        if name == "oom_recovered":
            self._snapshot_now()
        if self.args.should_save:
            append(self.args.output_dir, event)

    def _prepare_for_training(self, *args, **kwargs):
        model, loader = super()._prepare_for_training(*args, **kwargs)
        if self.memory_args.probe_worst_batch and self._recovers():
            pieces = probe(self, model, loader)
            if pieces is not None and self.when_probed is not None:
                self.when_probed(pieces)
        return model, loader

    def _between_windows(self) -> None:
        """After a window: make pieces smaller before memory runs out, larger after a quiet time."""
        started = self._window.started
        if not started or self._callback.monitor is None:
            self._resting = self._memory.allocated()
            return
        near, resting = self._near_peak, self._resting
        largest = max(started, key=lambda micro: micro.elements * micro.size // max(1, micro.rows))
        self._largest = max(self._largest or 0, largest.elements)
        self._callback.elements, self._callback.near_peak = sum(micro.elements for micro in started), near
        apart = self.args.world_size // self.get_tp_size()  # of a shared sample each process has its own tokens
        self._callback.tokens += apart * sum(tokens_of(micro.inputs) for micro in started)
        self._near_peak, self._resting = 0, self._memory.allocated()
        self._act(near, resting, min(largest.size, largest.rows), largest)

    def _act(self, near: int, resting: int, rows: int, micro) -> None:
        monitor = self._callback.monitor
        capacity = self._callback.growth.capacity
        status = monitor.status(near / capacity)
        if status == "emergency":
            free_memory()
        moves = near - resting > 0.02 * capacity  # what smaller pieces would make smaller
        if status in ("critical", "emergency") and moves and rows > self.limit.fewest_rows and self._recovers():
            after = self.limit.lower(rows, micro.elements * rows // micro.rows)
            self._event("micro_batch_lowered", status=status, utilization=round(near / capacity, 3),
                        micro_batch_before=rows, micro_batch_after=after)  # fmt: skip
        elif self.limit.quiet_step(resting + 2 * (near - resting) < monitor.target_utilization * capacity):
            self._event("micro_batch_restored", piece_elements=self.limit.elements)

    def largest_so_far(self, shapes: dict[str, list[int]]) -> bool | None:
        """Whether a batch has more tensor elements than all that were run; None where none was."""
        return None if self._largest is None else sum(math.prod(shape) for shape in shapes.values()) > self._largest

    def _agree_on_limit(self) -> None:
        """All processes take over the smallest limit before anything of a window is run."""
        if self.args.world_size > 1 and self._recovers():
            self.limit.agree(self._peers.smallest(self.limit.elements))

    def _dataset_indices(self, micro) -> list[int] | None:
        """Positions in the data set of a micro-batch's samples; None where the sampler's order cannot be known."""
        per_epoch = len(self._train_loader) if hasattr(self._train_loader, "__len__") else 0
        if not per_epoch:
            return None
        accumulation = self.args.gradient_accumulation_steps
        windows = -(-per_epoch // accumulation)
        epoch, window = divmod(self.state.global_step, windows)
        return batch_indices(self._train_loader, epoch, window * accumulation + micro.number)

    def _exhausted(self, stage: str, found: Diagnosis, micro, why: str = "", intact: bool = True) -> None:
        """Save the last good step, and end the run with a diagnosis.

        Args:
            intact: weights and optimizer states are those of the last good step.

        Raises:
            TrainingOutOfMemory: always.
        """
        if self.args.world_size > 1:
            self._peers.announce(found.message, self.limit.elements)
        if self.optimizer is not None and self._recovers():
            self.optimizer.zero_grad()
        self._snapshot_now()
        report = oom_report(self, stage, found, shapes_of(micro.inputs), self._dataset_indices(micro), why)
        if intact and self.is_in_train and self.state.global_step > 0:
            if self._window.began is not None:
                self._window.began.restore()
            report["checkpoint"] = self.emergency_checkpoint()
        raise TrainingOutOfMemory(told(report), report)

    def _snapshot_now(self) -> None:
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, SnapshotCallback):
                callback.out_of_memory()

    def _say(self, end: TrainingOutOfMemory) -> None:
        logger.error("%s", end.message)
        if end.report:
            path = Path(self.args.output_dir) / "oom_report.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(end.report, indent=2, default=str) + "\n")

    def _save_for_others(self, elements: int | None) -> None:
        """What a process does when another one cannot go on: its part of the last good step's checkpoint."""
        if self._recovers() and self._window.began is not None and self.state.global_step > 0:
            self.limit.agree(elements)
            self._window.began.restore()
            self.emergency_checkpoint()

    def _exhausted_in_eval(self, found: Diagnosis) -> None:
        report = oom_report(self, "eval", found, {}, None, "the evaluation batch is one sample")
        raise TrainingOutOfMemory(told(report), report)

    def _end_together(self, found: Diagnosis) -> None:
        """A process that failed while gradients were being reduced leaves the others waiting: all end, and what goes
        on from their checkpoint runs smaller pieces."""
        micro, rows = self._running
        why = "processes that have begun to reduce gradients cannot go back"
        if rows > 1:
            self.limit.lower(rows, micro.elements * rows // micro.rows)
        self._exhausted("backward", found, micro, why)


class MemoryTrainer(MemoryTrainerMixin, Trainer):
    """transformers.Trainer with MemoryTrainerMixin."""
