"""MemoryTrainer: a transformers Trainer that recovers from running out of memory."""

import contextlib
import itertools
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import Trainer

from hf_memopt.disk import claimed
from hf_memopt.engines import DDP, FSDP, NO_ENGINE, DeepSpeed, Engine, MeshEngine
from hf_memopt.errors import InputError
from hf_memopt.estimator.training_fields import read_trainer_fields
from hf_memopt.levers.apply import apply_levers, apply_to_trainer
from hf_memopt.levers.arguments import MemoryArguments
from hf_memopt.levers.facts import Facts
from hf_memopt.levers.features.compile_budget import memory_budget
from hf_memopt.levers.refusals import check_with_trl
from hf_memopt.levers.weight_streaming import streamer_of
from hf_memopt.monitor.callback import MemoryCallback, append
from hf_memopt.monitor.readers import Reader, process_limited
from hf_memopt.monitor.snapshot_callback import SnapshotCallback
from hf_memopt.oom.classify import Diagnosis, diagnose
from hf_memopt.oom.events import describe_event
from hf_memopt.presets.trl_configs import trl_trainer
from hf_memopt.trainer.checkpoints.intact import find_checkpoint
from hf_memopt.trainer.checkpoints.load_states import SafeLoad
from hf_memopt.trainer.checkpoints.resuming import SafeResume
from hf_memopt.trainer.checkpoints.saving import SafeCheckpoints
from hf_memopt.trainer.checkpoints.sharded_states import states_saved_here
from hf_memopt.trainer.combination import check_combination, check_constructor_arguments, check_start
from hf_memopt.trainer.data_loading import batch_order, loader_by_tokens, sequence_parallel_collator
from hf_memopt.trainer.distributed import Peers
from hf_memopt.trainer.ending import Ending, worker_death
from hf_memopt.trainer.evaluation import EvalRecovery
from hf_memopt.trainer.generation import GenerationRecovery
from hf_memopt.trainer.interrupt import interruptible
from hf_memopt.trainer.older_loop import OlderLoop
from hf_memopt.trainer.step.batch_limit import BatchLimit, Pressure
from hf_memopt.trainer.step.optimizer_guard import UpdateRecovery
from hf_memopt.trainer.step.probe import try_worst_batch
from hf_memopt.trainer.step.process_metrics import ProcessMetrics
from hf_memopt.trainer.step.recoverability import assess_recoverability
from hf_memopt.trainer.step.runner import StepRunner
from hf_memopt.trainer.step.window import MicroBatch

logger = logging.getLogger(__name__)


class MemoryTrainerMixin(EvalRecovery, GenerationRecovery, SafeResume, SafeLoad, SafeCheckpoints, OlderLoop):
    """Lets a Trainer subclass survive running out of memory: `class MyTrainer(MemoryTrainerMixin, SomeTrainer)`.

    Steps, schedule, optimizer, sample order and effective batch stay those of an uninterrupted run; a micro-batch that
    does not fit runs in smaller chunks, whose gradients add up to its own. Dropout draws other masks for chunks than
    for the whole. Where the losses of chunks do not add up (contrastive losses, batch normalization, a router's
    auxiliary loss), a micro-batch is not split: the run ends with a diagnosis and a checkpoint.

    Attributes:
        memory_args: MemoryArguments.
        memory_events: recovered OOMs and other events, oldest first: dicts with `event` and `step`.
        when_probed: called with the chunk size that fitted, where the largest batch did not fit whole.
        packing: tokens of a packed row, where batches are packed as they run (VideoTrainer); None elsewhere.
    """

    when_probed: Callable[[int], None] | None = None
    packing: int | None = None
    _runner: StepRunner | None = None
    _train_loader = None
    is_distributed_loading_by_transformers = False  # Trainer's; older versions have no such models

    def __init__(self, *args, memory_args: MemoryArguments | None = None, **kwargs) -> None:
        """Args:
            memory_args: MemoryArguments; defaults if None. All other arguments are the Trainer's.

        Raises:
            InputError: auto_find_batch_size is set, which would restart the schedule with a smaller effective batch;
                or a memory argument, or the combination of optimizer, engine and method, does not work.
        """
        self.memory_args = memory_args or MemoryArguments()
        self.memory_events: list[dict[str, Any]] = []
        own_optimizer = kwargs.get("optimizer_cls_and_kwargs") is not None or self.memory_args.adam_mini
        check_constructor_arguments(args, kwargs, own_optimizer)  # before the Trainer fails with a less clear message
        with states_saved_here(*args, **kwargs):
            super().__init__(*args, **kwargs)
        check_combination(self.model, self.args, self.accelerator.state, self.optimizer, own_optimizer)
        if self.args.auto_find_batch_size:
            raise InputError(
                "auto_find_batch_size=True restarts the schedule and shrinks the effective batch: leave it out, "
                "MemoryTrainer recovers within the step"
            )
        if self.get_sp_size() > 1:
            self.data_collator = sequence_parallel_collator(self)
        self._apply_levers(self.model)
        apply_to_trainer(self, self.memory_args)
        self._peers = Peers(self.accelerator)
        self._compose()
        if self._recoverability.reason and self.memory_args.oom_recovery:
            logger.warning("micro-batches run whole: %s", self._recoverability.reason)
        own = next((each for each in self.callback_handler.callbacks if isinstance(each, MemoryCallback)), None)
        self._callback = own or MemoryCallback(self.memory_args).attach(self)  # which runs before all others
        if self.memory_args.snapshot_steps or self.memory_args.snapshot_on_oom:
            self.add_callback(SnapshotCallback(self.memory_args.snapshot_steps, self.memory_args.snapshot_on_oom))

    def _compose(self) -> None:
        """Make the helpers that hold a reference to this trainer. A copy of a trainer has to call it again."""
        self._pressure = Pressure(self, Reader(self.args.device))
        self._ending = Ending(self, self._peers)
        self._recoverability = assess_recoverability(self)
        self._runner = StepRunner(self, self._recoverability, self._first_limit())
        self._metrics_of_process = ProcessMetrics(self)
        self._updates = UpdateRecovery(self, self._runner)

    # ---- where a batch holds its samples: override both for batches of another layout

    def count_samples(self, inputs) -> int:
        """Samples in a micro-batch: by default its rows; half as many for TRL's pairs of answers."""
        return self._recoverability.layout.count(inputs)

    def split_batch(self, inputs, start: int, stop: int) -> dict[str, Any]:
        """The samples from `start` up to, but not including, `stop` of a micro-batch.

        Raises:
            InputError: a tensor does not have one row per sample.
        """
        return self._recoverability.layout.chunk(inputs, start, stop)

    @property
    def limit(self) -> BatchLimit:
        """How many samples run at once."""
        return self._runner.limit

    @property
    def later_steps(self) -> tuple[int, int, float]:
        """All optimizer steps but one: their number, tokens on all devices, and seconds without waiting for data. The
        seconds are without the first step's, the tokens without the last one's, which are counted as the next begins.
        """
        steps, seconds = self._callback.data_wait.steps_of_run()
        return steps, self._callback.tokens, seconds

    @property
    def data_wait_share(self) -> float | None:
        """Share of step time spent waiting for batches, without the first step; None before the second."""
        return self._callback.data_wait.share_of_run()

    def _apply_levers(self, model) -> None:
        """Apply the memory arguments to a model.

        Raises:
            InputError: one of them does not work with the model, or with another setting.
        """
        fields, device = read_trainer_fields(self), self.args.device.type
        Facts.of_settings(self.memory_args, fields, self._engine(), device).check_features()
        if (kind := trl_trainer(self)) is not None:
            check_with_trl(self.memory_args, kind.__name__)
        if model is None:
            return
        apply_levers(model, self.memory_args, self.args.label_smoothing_factor)
        if (streamer := streamer_of(model)) is not None:
            streamer.place(device=self.args.device)
            if self.place_model_on_device and getattr(model, "quantization_method", None) is None:
                self._move_model_to_device(model, self.args.device)
        if self.memory_args.loss_chunk_size is not None:
            self.label_smoother = None  # the chunked loss smooths labels itself

    def _move_model_to_device(self, model, device) -> None:
        # Else _apply_levers() does it, once what is streamed lies in host memory.
        if not self.memory_args.weight_streaming or streamer_of(model) is not None:
            super()._move_model_to_device(model, device)

    def _engine(self) -> Engine:
        if self.is_distributed_loading_by_transformers:
            return MeshEngine()
        kind, plugin = self.accelerator.distributed_type.value, self.args.deepspeed_plugin
        if kind == "FSDP":
            return FSDP(fsdp_version=self.accelerator.state.fsdp_plugin.fsdp_version)
        if kind == "DEEPSPEED":
            return DeepSpeed(f"zero{plugin.zero_stage if plugin else 0}")
        return NO_ENGINE if kind == "NO" else DDP()

    @property
    def batches(self) -> int:
        """Number of processes with a batch of their own: ranks of tensor and sequence parallelism share one."""
        return self.args.world_size // self.get_tp_size() // self.get_sp_size()

    def call_model_init(self, trial=None):
        model = super().call_model_init(trial)
        if self._runner is not None:  # train() makes the model again where model_init is set
            self._apply_levers(model)
        return model

    def _first_limit(self) -> BatchLimit:
        """The limit to start with.

        With max_batch_size, micro-batches of that size are fetched and first run in chunks of
        per_device_train_batch_size, so that chunks can grow while the effective batch stays.
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
        # The Trainer's constructor copied the old value, which its data loader is made with (transformers 5.23).
        self._train_batch_size = args.train_batch_size
        return BatchLimit(memory.adjustment_frequency, memory.min_batch_size, first)

    def show_predicted_peak(self, peak_bytes: int) -> None:
        """Log the allocated peak that an estimate predicts beside the measured one, for the trackers of report_to.

        Args:
            peak_bytes: `peak_allocated_bytes` of the estimate.
        """
        self._callback.predicted_peak_bytes = peak_bytes

    def train(self, resume_from_checkpoint=None, *args, **kwargs):
        check_start(self.args, self.accelerator.state)
        self._newest, self._runner.resume_states = None, {}  # forget an earlier call
        folder, only_model = Path(self.args.output_dir), self.args.save_only_model
        checkpoint = self._agree_on_checkpoint(find_checkpoint(resume_from_checkpoint, folder, only_model))
        own = claimed(self.args.output_dir) if self.args.process_index == 0 else contextlib.nullcontext()
        # Before all others, so that a step counts as finished even where another callback fails at its end.
        # add_callback() can only append (transformers 5.23).
        self.callback_handler.callbacks.insert(0, self._ending.updates)
        try:
            with (
                own,
                _settings_of_run(self),
                interruptible(self) as stop,
                self._peers.watching(self._ending.save_for_peer),
            ):
                try:
                    return super().train(checkpoint, *args, **kwargs)
                except Exception as error:
                    cause = worker_death(error)
                    if stop.signal is not None or not self._ending.can_explain(cause):
                        raise
                    diagnosis = diagnose(cause)
                    traceback.clear_frames(error.__traceback__)
                self._ending.end_run_outside_step(diagnosis)
        finally:
            self.remove_callback(self._ending.updates)

    def get_train_dataloader(self):
        by_tokens = self.memory_args.max_tokens_per_batch or self.packing
        loader = loader_by_tokens(self) if by_tokens else super().get_train_dataloader()
        # The Trainer fetches all micro-batches of a window before the first runs, and accelerate's DataLoaderShard
        # (1.15) moves each to its `device`. Without one they stay on the host until _prepare_inputs moves them.
        if getattr(loader, "device", None) is not None and self._runner.recovers:
            loader.device = None
        self._train_loader = loader
        return loader

    # ---- steps. The Trainer (transformers 5.23) calls these in this order; test_step.py fails when it no longer does.

    def get_batch_samples(self, epoch_iterator, *args, **kwargs):
        self._pressure.after_window(self._runner.window)
        self._runner.begin_window()
        self._metrics_of_process.begin_step()
        if self.args.world_size > 1 and self._runner.recovers:
            self.limit.adopt(self._peers.smallest(self.limit.elements))  # of all processes
        try:
            return super().get_batch_samples(self._callback.data_wait.timed(epoch_iterator), *args, **kwargs)
        except Exception as error:
            diagnosis = self._ending.explain(error)
        self._ending.end_run_outside_step(diagnosis, "data")

    def training_step(self, model, inputs, num_items_in_batch=None):
        with self._metrics_of_process.kept_apart():
            loss = self._runner.run(super().training_step, model, inputs, num_items_in_batch)
        self._metrics_of_process.bring_together()
        return loss

    def _clip_grad_norm(self, model):
        return self._updates.clip(super()._clip_grad_norm, model)

    def _prepare_for_training(self, *args, **kwargs):
        model, loader = super()._prepare_for_training(*args, **kwargs)  # makes the optimizer
        self._training_begins(model, loader)
        return model, loader

    def _training_begins(self, model, loader) -> None:
        """Guard the optimizer, and try the largest batch where probe_worst_batch is set."""
        self._updates.guard_optimizer()
        if self.args.world_size > 1 and self._runner.recovers:
            # Of the DDP model, not of the one within: a user's own hook that fails there would come before ours.
            model.register_forward_pre_hook(self._runner.note_forward)
        if not self.memory_args.probe_worst_batch:
            return
        if self._runner.own_loss:
            raise InputError(
                "probe_worst_batch=True runs the loss once more than training does, which a loss of your own may not "
                "allow: leave it out"
            )
        if not self._runner.recovers:
            logger.warning("probe_worst_batch: no batch is tried (%s)", self._recoverability.reason)
            return
        samples = try_worst_batch(self, model, loader)
        if samples is not None and self.when_probed is not None:
            self.when_probed(samples)

    # ---- called by the helpers

    def _event(self, name: str, **details: Any) -> None:
        """Record an event: in memory_events, memory_log.jsonl and as a warning."""
        event = {"event": name, "step": self.state.global_step, "process": self.args.process_index, **details}
        self.memory_events.append(event)
        logger.warning("%s", describe_event(event))
        if name == "oom_recovered":
            self._ending.write_snapshot()
        if self.args.should_save:
            append(self.args.output_dir, event)

    def _recovered(self, stage: str, diagnosis: Diagnosis, before: int, after: int, **details: Any) -> None:
        """Record an out-of-memory failure after which `after` samples run at once, and not `before`."""
        sizes = {"micro_batch_before": before, "micro_batch_after": after}
        self._event("oom_recovered", stage=stage, cause=diagnosis.cause, message=diagnosis.message, **sizes, **details)

    def _dataset_indices(self, micro: MicroBatch) -> list[int] | None:
        """Dataset indices of a micro-batch's samples; None where the sampler's order is not known."""
        per_epoch = len(self._train_loader) if hasattr(self._train_loader, "__len__") else 0
        if not per_epoch:
            return None
        accumulation = self.args.gradient_accumulation_steps
        windows = -(-per_epoch // accumulation)
        epoch, window = divmod(self.state.global_step, windows)
        if (order := batch_order(self._train_loader, epoch)) is None:
            return None
        return next(itertools.islice(order, window * accumulation + micro.number, None), None)


class MemoryTrainer(MemoryTrainerMixin, Trainer):
    """transformers.Trainer with MemoryTrainerMixin."""


@contextlib.contextmanager
def _settings_of_run(trainer: "MemoryTrainer") -> Iterator[None]:
    """A context with the allocator's limit and the compiler's memory budget of a trainer's MemoryArguments.

    On exit it also stops snapshots, since on_train_end is not called after an error.
    """
    memory, device = trainer.memory_args, trainer.args.device
    budget = memory.compile_memory_budget if trainer.args.torch_compile else None
    try:
        with process_limited(device, memory.max_memory_gib) as limited, memory_budget(budget):
            if memory.max_memory_gib is not None and not limited:
                logger.warning(
                    "max_memory_gib=%s: the CPU allocator has no limit; only the thresholds follow it",
                    memory.max_memory_gib,
                )
            yield
    finally:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, SnapshotCallback):
                callback.stop()
