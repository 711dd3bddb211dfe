"""Predictions of a recipe: before it runs, the memory of its longest samples; afterwards, of its measured batch."""

import copy
from dataclasses import dataclass, replace
from typing import Any

from hf_memopt.errors import one_line
from hf_memopt.estimator.largest_batch import is_padded
from hf_memopt.estimator.result import Estimate
from hf_memopt.presets.trl_configs import trl_trainer
from hf_memopt.recipe.job import Job
from hf_memopt.video.inputs import VideoInputs


@dataclass(frozen=True)
class PeakBatch:
    """The batch at whose forward or backward a run's peak was measured.

    Attributes:
        tensors: what the model got; pixels on the meta device.
        training: a training batch, not one of evaluation.
        with_gradients: gradients of an earlier micro-batch were accumulating.
        with_states: the optimizer had its states.
    """

    tensors: dict[str, Any]
    training: bool = True
    with_gradients: bool = True
    with_states: bool = True

    def on_host(self) -> "PeakBatch":
        """The same in host memory, which the run does not need."""
        on_host = {
            name: tensor if tensor.device.type in ("meta", "cpu") else tensor.cpu()
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=on_host)

    @property
    def shape(self) -> tuple[int, int]:
        """Samples, and tokens of each."""
        return tuple(self.tensors["input_ids"].shape)

    @property
    def label(self) -> str:
        """The batch as people read it."""
        samples, tokens = self.shape
        return f"{'' if self.training else 'evaluation, '}{samples} × {tokens} tokens"


def predict(job: Job, trainer, length: int, **about) -> Estimate | None:
    """The job's Estimate on its device, for samples of `length` tokens; None where it cannot be traced.

    Args:
        about: further arguments of describe(): video, frozen.
    """
    if trl_trainer(trainer) and job.preset.sequence_parallel > 1:
        print("  memory  not predicted: TRL's trainers are not traced with samples that devices share")
        return None
    if trl_trainer(trainer) and job.preset.mesh:
        print("  memory  not predicted: TRL's trainers are not traced where transformers shards the model")
        return None
    if trl_trainer(trainer) and job.preset.engine.zero_stage == 3:  # its weights are parts once they are loaded
        print("  memory  not predicted here: `hf-memopt estimate` with --task and --strategy zero3 predicts it")
        return None
    try:
        if trl_trainer(trainer):
            return _estimate_trainer(job, trainer)
        return _estimate(job, trainer, length, **about)
    except Exception as error:
        # The trace runs the model's own code, which may ask fake tensors for values. Training continues without it.
        print(f"  memory  not predicted: {one_line(error)[:200]}")
        return None


def predict_batch(job: Job, trainer, limit: Estimate | None, batch: PeakBatch | None) -> Estimate | None:
    """The Estimate of a batch that ran, in the state that training was in; None where there is none to compare.

    Args:
        limit: what predict() returned.
    """
    if limit is None or batch is None or (trl_trainer(trainer) and not tunes_answers(trainer)):
        return None  # batches of other trainers are not those of a language model
    try:
        if tunes_answers(trainer):
            return _in_state(_estimate_trainer(job, trainer, batch), batch)
        # Samples of videos are padded.
        about = {"padded": True, "frozen": job.recipe.frozen} if hasattr(job.recipe, "frozen") else {}
        return _in_state(_estimate(job, trainer, batch.shape[1], batch, **about), batch)
    except Exception as error:  # as in predict(): the run is over and its report must be written
        print(f"the batch of the measured peak is not predicted: {one_line(error)[:200]}")
        return None


def tunes_answers(trainer) -> bool:
    """True for TRL's SFTTrainer, whose loss is a mean over tokens."""
    kind = trl_trainer(trainer)
    return kind is not None and kind.__name__ == "SFTTrainer"


def _estimate_trainer(job: Job, trainer, batch: PeakBatch | None = None) -> Estimate:
    """The estimate of one of TRL's trainers as it is, with its own largest batches or on one that ran."""
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.trainer_job import describe_trainer

    described = describe_trainer(trainer, job.preset.hardware, None, None)
    if batch is not None:
        described = replace(
            described,
            fields=described.fields | ({} if batch.with_gradients else {"gradient_accumulation_steps": 1}),
            seq_len=batch.shape[1],
            padded=is_padded(batch.tensors),
            inputs=batch.tensors,
            eval_inputs=described.eval_inputs and batch.tensors,
        )
    return estimate_job(described)


def _in_state(estimate: Estimate, batch: PeakBatch) -> Estimate:
    """The estimate without what had not happened yet: an evaluation's is of evaluation and of the optimizer alone, and
    the first step runs without the optimizer's states."""
    phases = dict(estimate.phases)
    if not batch.training:
        del phases["forward"], phases["backward"]
    elif not batch.with_states and estimate.phase in ("forward", "backward"):
        states = estimate.breakdown.get("optimizer_states", 0)
        phases |= {name: max(0, phases[name] - states) for name in ("forward", "backward")}
    peak = max(phases.values())
    missing = estimate.peak_allocated_bytes - peak
    return replace(
        estimate,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=estimate.peak_reserved_bytes - missing,
        device_bytes=estimate.device_bytes - missing,
        phases=phases,
        phase=max(phases, key=phases.get),
    )


def _estimate(job: Job, trainer, length: int, batch: PeakBatch | None = None, **about) -> Estimate:
    """The estimate of a recipe's job, for samples of `length` tokens.

    Args:
        batch: one that ran, in place of the largest.
    """
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.job import describe
    from hf_memopt.estimator.training_fields import read_trainer_fields

    config = copy.deepcopy(trainer.model.config)
    quantization = config.__dict__.pop("quantization_config", None)
    config.__dict__.pop("distributed_config", None)
    if trainer.packing:
        config.get_text_config().use_cache = False  # as VideoTrainer runs it
    described = describe(
        config,
        read_trainer_fields(trainer),
        length,
        job.preset.hardware,
        peft_config=job.peft_config,
        dtype=job.preset.dtype,
        attn_implementation=config._attn_implementation,
        quantization_config=quantization,
        world_size=job.args.world_size,
        strategy=job.preset.strategy if job.preset.mesh else None,
        memory_args=job.memory_args,
        shared=job.preset.sequence_parallel,
        **about,
    )
    if batch is not None:
        samples = batch.shape[0]
        fields = described.fields | {"per_device_train_batch_size": samples, "per_device_eval_batch_size": samples}
        if batch.training and not batch.with_gradients:
            fields["gradient_accumulation_steps"] = 1
        sees = any(name.startswith("pixel_values") for name in batch.tensors)
        video = VideoInputs(sample=batch.tensors) if sees else None
        described = replace(described, fields=fields, real_batch=batch.tensors, video=video)
    return estimate_job(described)
