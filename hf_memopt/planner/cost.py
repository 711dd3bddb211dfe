"""Predicted seconds of an optimizer step, by which choices are ranked.

The traced kernels' seconds (timing.speed), the second forward of checkpointed layers among them, offloading
and what engines add (timing.step_time). benchmarks/speed_published.py compares the result with published speeds.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from hf_memopt.estimator.accounting.work import computed_once
from hf_memopt.estimator.timing.generation_time import FORWARD, Rollout, rollout_time
from hf_memopt.estimator.timing.speed import Seconds, kernel_seconds, memory_rate
from hf_memopt.estimator.timing.step_time import Step, StepTime, host_link
from hf_memopt.estimator.timing.throughput import main_attention
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.sketch import Sketch, Traced

# A choice that rounds values, or needs host memory and its link, which other programs use too, must take less than
# 90 % of the time of one that does not, and a little less than that for the features that the other may have.
COMPLEXITY = 1.125
ENGINE = 1.02  # a sharding engine brings settings, checkpoints and failures of its own, which DDP has not
# An engine that keeps weights or optimizer states in host memory: no published run of one was compared with its
# predicted speed, and those that share PCIe were off by up to 73 % (benchmarks/results/speed_published.json).
UNCOMPARED = 1.5
LEVER = 1.002  # for every memory feature, so that of equally fast choices the one with fewest is chosen


@dataclass(frozen=True)
class Cost:
    """Predicted seconds of choices on one device.

    Args:
        sketch: of the job.
        drives: NVMe drives of each machine that share what is offloaded to disk.
    """

    sketch: Sketch
    drives: int = 1

    @functools.cached_property
    def _seconds(self) -> Callable[..., Seconds]:
        """Seconds of a trace's micro-batch and optimizer step on the job's device, each computed once; larger
        micro-batches are extrapolated by those of a device without a cache."""
        device, attention = self.sketch.job.device, main_attention(self.sketch.job)
        return functools.cache(lambda traced, cached=0.0: kernel_seconds(traced.kernels, device, attention, cached))

    @functools.cached_property
    def steps(self) -> StepTime:
        """The time that engines add to the kernels' seconds."""
        return StepTime.of(self.sketch.job, self.sketch.trained, self.sketch.loaded, self.drives)

    def _steps(self, choice: Choice) -> StepTime:
        """steps, with what devices send each other that share samples."""
        if choice.shared == 1:
            return self.steps
        fields = {**self.sketch.job.fields, "activation_checkpointing": bool(choice.checkpointed)}
        job = replace(self.sketch.job, shared=choice.shared, engine=choice.engine, fields=fields)
        return StepTime.of(job, self.sketch.trained, self.sketch.loaded, self.drives)

    def step(self, choice: Choice) -> float:
        """One optimizer step."""
        micro = self._micro(choice)
        moved = self._offloaded(choice) + max(0.0, self.copying(choice) - micro)
        return self._steps(choice).seconds(self.computed(choice, micro + moved)) + sum(self.rollout(choice))

    def copying(self, choice: Choice) -> float:
        """Seconds in which a micro-batch's streamed weights are copied, once for forward and once for backward: each
        layer's while the one before computes (estimator.timing.throughput). Activations come back by the same link."""
        size = 2 * self.sketch.streamed_bytes(choice)
        if size and choice.moves_activations:
            size += self.sketch.activations(choice)
        return size / host_link(self.sketch.job.device) if size else 0.0

    def link_bound(self, choice: Choice) -> str | None:
        """Say that a micro-batch waits for its weights, in a sentence; None where it does not."""
        copying, micro = self.copying(choice), self._micro(choice)
        if copying <= micro:
            return None
        return (
            f"the link to host memory bounds the speed: a micro-batch computes for {micro:.2g} s, and its weights "
            f"take {copying:.2g} s to arrive"
        )

    def rollout(self, choice: Choice) -> Rollout:
        """Seconds in which a step's completions are generated and scored."""
        if not choice.trl.generations:
            return Rollout(0.0, 0.0)
        forward = FORWARD * self._line(self._once, self.sketch.samples(choice))
        fields = {
            "per_device_train_batch_size": choice.micro_batch,
            "gradient_accumulation_steps": choice.accumulation,
            **choice.trl.fields(),
        }
        return rollout_time(
            replace(self.sketch.job, engine=choice.engine),
            self.sketch.plain[0].peaks,
            forward,
            FORWARD * self._seconds(self._once[0]).launches,
            fields,
        )

    @functools.cached_property
    def _once(self) -> tuple[Traced, Traced]:
        """The traces without checkpointed layers, less what backward computes again even there, as TRL's head does its
        chunks (trl 1.16, add_fused_lm_head): a pass that generates or scores has no backward."""
        return tuple(replace(traced, kernels=computed_once(traced.kernels)) for traced in self.sketch.plain)

    def computed(self, choice: Choice, micro_seconds: float) -> Step:
        """The work of a choice's step.

        Args:
            micro_seconds: of a micro-batch.
        """
        plain, checkpointed = (self._seconds(pair[0]) for pair in (self.sketch.plain, self.sketch.checkpointed))
        return Step(
            engine=choice.engine,
            accumulation=choice.accumulation,
            micro_seconds=micro_seconds,
            launch_seconds=plain.launches + choice.checkpointed * (checkpointed.launches - plain.launches),
            optimizer_seconds=plain.optimizer,
            optimizer_offloaded="optimizer_cpu_offload" in choice.knobs,
            paged_bytes=self.sketch.paged_bytes(choice),
        )

    def rank(self, choice: Choice) -> float:
        """The sort key: the step's time with penalties for rounding, offloading and, a little, for a sharding engine
        and every feature."""
        engine = 1.0 if choice.engine.plain else ENGINE * (UNCOMPARED if choice.engine.offloads else 1.0)
        return self.step(choice) * engine * COMPLEXITY**choice.complexities * LEVER**choice.levers

    def _micro(self, choice: Choice) -> float:
        samples = self.sketch.samples(choice)
        seconds = sum(share * self._line(pair, samples) for share, pair in self.sketch.shares(choice))
        for knob in choice.on:
            seconds = knob.seconds(seconds, self, choice)
        return seconds

    @property
    def memory_rate(self) -> float:
        """Bytes a second of the device's memory."""
        return memory_rate(self.sketch.job.device)

    def _line(self, pair: tuple[Traced, Traced], samples: float) -> float:
        """Seconds of a micro-batch, by the line through one sample and two, less what the device's cache saves."""
        first, second = (self._seconds(traced).micro for traced in pair)
        line = max(first * min(1, samples), first + (second - first) * (samples - 1))
        # A kernel of this micro-batch fits the cache where that of the traced one, so many times smaller, fits a cache
        # as many times smaller.
        traced, scale = (pair[0], samples) if samples < 2 else (pair[1], samples / 2)
        return line - scale * (self._seconds(traced).micro - self._seconds(traced, 1 / scale).micro)

    def _offloaded(self, choice: Choice) -> float:
        """Seconds that a micro-batch waits for activations that are copied.

        Two tensors are in flight at a time (levers/activation_offload.py), so a layer's copies overlap with that layer
        alone: not with those that keep only their inputs, and in each direction with its own pass. transformers copies
        inputs on the stream that computes, and nothing overlaps (activation_checkpointing_enable, offload).
        """
        if not choice.moves_activations:
            return 0.0
        moving = self.sketch.activations(choice) / host_link(self.sketch.job.device)
        if choice.inputs_offloaded:
            return 2 * moving
        samples = self.sketch.samples(choice)
        plain = self._line(self.sketch.plain, samples)
        forward = max(0.0, self._line(self.sketch.checkpointed, samples) - plain)  # what is computed again
        passes = ((1 - choice.checkpointed) * seconds for seconds in (forward, plain - forward))
        return sum(self.steps.overlapped(computing, moving) - computing for computing in passes)
