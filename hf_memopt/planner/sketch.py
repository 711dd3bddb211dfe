"""A fast approximation of every choice's memory and work, by lines through four traces of the job.

The job is traced with no layer checkpointed and with all, for one sample and for two, as if on one device. Segments'
peaks are linear in the samples of a micro-batch and in the share of checkpointed layers; what other choices change is
computed by kind of memory. A sketch finds the choices that are worth a whole estimate; the answer is always an
estimate.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from hf_memopt.engines import NO_ENGINE
from hf_memopt.estimator import overheads
from hf_memopt.estimator.accounting.ledger import GENERATION, KINDS, Peak, TraceResult
from hf_memopt.estimator.accounting.work import Kernel, extended
from hf_memopt.estimator.api import run_trace
from hf_memopt.estimator.assembly import capacity, phase_of
from hf_memopt.estimator.colocation import colocates, engine_share
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.timing.throughput import Throughput, main_attention, speed_note, unknown_speed, with_speed
from hf_memopt.estimator.tracing.extrapolate import count_layers, extrapolate_peaks, shallow_depths
from hf_memopt.estimator.tracing.parallel import on_all_cores
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.measured import constant
from hf_memopt.levers.features.activations import COMPRESSED
from hf_memopt.planner.choices import Choice
from hf_memopt.stack.vocabulary import written

_STATES_8BIT = 0.26  # of fp32 states: a byte each and a scale for every 256
# Sketches have neither the allocator's reserve nor fp16's gradient scaler, until an estimate of the same kind of card
# corrects them. Of Qwen3-1.7B and 4B, full, LoRA and QLoRA, on 19 cards and boxes they were low by 1 to 9 % (bf16), up
# to 14 % (fp16) and up to 17 % (MPS).
_CAUTION, _CAUTION_FP16, _CAUTION_MPS = 1.06, 1.15, 1.18


@dataclass(frozen=True, eq=False)
class Traced:
    """One traced job at full depth.

    Attributes:
        peaks: segment -> what is alive, by kind.
        growing: segment -> bytes of activations that grow with the number of layers.
        kernels: of a micro-batch and of the optimizer's step.
    """

    peaks: dict[str, Peak]
    growing: dict[str, int]
    kernels: Counter[Kernel]


def caution(device: Hardware) -> float:
    """The factor of a device's sketches, as long as no estimate corrects them."""
    return _CAUTION_MPS if device.backend == "mps" else _CAUTION if device.native_bf16 else _CAUTION_FP16


def traced_jobs(jobs: list[Job]) -> list[Traced]:
    """Peaks and kernels of jobs at full depth, with one micro-batch a step, as if on one device.

    Raises:
        InputError: a job that cannot be traced.
    """
    alone = [
        replace(job, fields={**job.fields, "gradient_accumulation_steps": 1}, engine=NO_ENGINE, world_size=1)
        for job in jobs
    ]
    depths = shallow_depths(jobs[0].config)
    # Jobs with the same batch are neighbours, for parallel's shares: they have most shapes in common.
    order = sorted(range(len(alone)), key=lambda number: alone[number].fields["per_device_train_batch_size"])
    traces = iter(on_all_cores(_counted, [(alone[number], depth) for number in order for depth in depths]))
    traced = {number: _at_full_depth(jobs[number].config, depths, [next(traces) for _ in depths]) for number in order}
    return [traced[number] for number in range(len(alone))]


def _counted(trace_of: tuple[Job, int]) -> TraceResult:
    job, depth = trace_of
    return run_trace(replace(job.at_depth(depth), counted=True))


def _at_full_depth(config, depths: tuple[int, ...], traces: list[TraceResult]) -> Traced:
    peaks = extrapolate_peaks(config, depths, [trace.moments for trace in traces])
    # Of one step: where weights get no gradient, two are traced.
    kernels = [Counter({kernel: count / trace.steps for kernel, count in trace.kernels.items()}) for trace in traces]
    if len(depths) == 1:  # a shallow model, traced whole: nearly all activations are its layers'
        return Traced(peaks, {name: peak.by_kind.get("activations", 0) for name, peak in peaks.items()}, *kernels)
    low, high = (trace.peaks for trace in traces)
    period, depth = depths[1] - depths[0], count_layers(config)
    growing = {}
    for name in peaks:
        shallow, deep = (phase_peaks[name].by_kind.get("activations", 0) for phase_peaks in (low, high))
        growing[name] = max(0, deep - shallow) * depth // period
    return Traced(peaks, growing, extended(*kernels, (depth - depths[0]) // period))


@dataclass(frozen=True)
class Sketch:
    """Four traced jobs and what follows from them.

    Attributes:
        job: of the first trace.
        plain, checkpointed: traces with no layer and with all layers checkpointed, of one sample and of two (or, where
            a micro-batch needs two, of two and four). The same where no choice needs one of them.
        trained: number of parameters that are trained.
    """

    job: Job
    plain: tuple[Traced, Traced]
    checkpointed: tuple[Traced, Traced]
    trained: int

    def shares(self, choice: Choice) -> tuple[tuple[float, tuple[Traced, Traced]], ...]:
        """The share of the layers that a choice treats as each pair of traces does, and the pair."""
        return (1 - choice.checkpointed, self.plain), (choice.checkpointed, self.checkpointed)

    @functools.cached_property
    def loaded(self) -> int:
        """Bytes of the weights, on one device."""
        return max(peak.by_kind.get("parameters", 0) for peak in self.plain[0].peaks.values())

    @functools.cached_property
    def outside_layers(self) -> int:
        """Number of weights outside the layers."""
        return self.job.elements()[0]

    @property
    def largest_weight(self) -> int:
        """Bytes of the largest weight, as it is loaded."""
        return self.outside_layers * getattr(torch, self.job.dtype).itemsize

    def device_bytes(self, choice: Choice, length: float = 1.0) -> tuple[int, int]:
        """Bytes that a choice needs on each device, and of those the ones that grow with its micro-batch.

        Args:
            length: of samples, relative to the job's.
        """
        segments = [(name, *_split(self.kinds(name, choice))) for name in self.plain[0].peaks]
        engine = self._engine_bytes(choice)
        sizes = [(fixed + engine * (not choice.trl.sleeps), moving * length) for _, fixed, moving in segments]
        if choice.trl.sleeps:  # vLLM is there while the model waits
            sizes += [(fixed + engine, moving * length) for name, fixed, moving in segments if name == "between"]
        fixed, moving = max(sizes, key=sum)
        return int(fixed + moving) + overheads.context(self.job.device), int(moving)

    def _engine_bytes(self, choice: Choice) -> int:
        """Bytes of a vLLM that shares the card (estimator.colocation)."""
        share = choice.trl.share
        if share is not None:
            return int(share * self.job.device.memory)
        return engine_share(self.job) if colocates(self.job.fields) else 0

    def _reference(self, choice: Choice) -> int:
        """Bytes of the reference model that a choice does without."""
        if not choice.trl.precomputed or self.job.fields.get("precompute_ref_log_probs"):
            return 0
        outside, layer = self.job.elements()
        return (outside + layer * count_layers(self.job.config)) * getattr(torch, self.job.dtype).itemsize

    def samples(self, choice: Choice) -> float:
        """Samples of a choice's micro-batch, in those of the first trace; a part of one that devices share."""
        return choice.micro_batch / self.job.fields["per_device_train_batch_size"] / choice.shared

    def host_bytes(self, choice: Choice) -> int:
        """Bytes that a choice moves to the host from each device."""
        moved = sum(knob.host(self, choice) for knob in choice.on)
        if choice.moves_activations:
            moved += self.activations(choice) * (COMPRESSED[2] if "activation_compression" in choice.knobs else 1)
        if choice.paged:
            moved += self._states(choice)
        moved += self.streamed_bytes(choice)
        if choice.engine.offloads:
            moved += choice.engine.host_bytes(self.job.world_size, self.loaded, self.trained)
        return int(moved)

    def _states(self, choice: Choice) -> float:
        """Bytes of Adam's states."""
        return 8 * self.trained * (self._states_8bit if "8bit" in choice.optim else 1)

    @functools.cached_property
    def _states_8bit(self) -> float:
        """Bytes of 8-bit states, of fp32 ones: transformers has bitsandbytes keep embeddings' in 32 bits."""
        text = self.job.config.get_text_config()
        embedded = getattr(text, "vocab_size", 0) * getattr(text, "hidden_size", 0)
        share = min(embedded, self.job.elements(trained=True)[0]) / max(1, self.trained)
        return share + (1 - share) * _STATES_8BIT

    def paged_bytes(self, choice: Choice) -> float:
        """Bytes of optimizer states that come to the device and leave it in every step, for lack of memory."""
        if not choice.paged:
            return 0.0
        room = (self.job.device.memory or math.inf) - self.device_bytes(choice)[0]
        return states if (states := self._states(choice)) > room else 0.0

    @functools.cached_property
    def _streamed(self) -> tuple[float, float]:
        """Bytes of frozen weights in host memory in the traced job: of the layers, and of all else."""
        if not getattr(self.job.memory_args, "weight_streaming", False):
            return 0.0, 0.0
        peaks = self.plain[0].peaks.items()
        held = min(peak.host for name, peak in peaks if name.startswith(("forward", "backward")))
        outside = min(held, self.outside_layers * getattr(torch, self.job.dtype).itemsize)
        return held - outside, outside

    def streamed_bytes(self, choice: Choice) -> float:
        """Bytes of weights that a choice keeps in host memory, or the user's own settings do."""
        layers, outside = self._streamed
        return outside + layers * (choice.streamed or 1)

    def kinds(self, name: str, choice: Choice) -> dict[str, float]:
        """The bytes that a segment holds at its peak, by kind.

        Of what grows with depth a second sample adds the activations: the rest, as autocast's copies of weights,
        cannot be compressed or moved.
        """
        kinds: dict[str, float] = {}
        growing, samples = 0.0, self.samples(choice)
        if name.startswith(GENERATION) and (steps := choice.trl.steps_per_generation):  # micro-batches, all at once
            samples = samples * steps / self.job.fields["steps_per_generation"]
        for share, (single, double) in self.shares(choice):
            if name not in single.peaks or name not in double.peaks:
                continue
            of_kind = _line(single.peaks[name].by_kind, double.peaks[name].by_kind, samples)
            for kind, size in of_kind.items():
                kinds[kind] = kinds.get(kind, 0) + share * size
            growing += share * (double.growing[name] - single.growing[name]) * samples
        self._change(kinds, growing, choice, name)
        return kinds

    def _change(self, kinds: dict[str, float], growing: float, choice: Choice, name: str) -> None:
        """Change one device's memory as levers and engines do."""
        kinds["activations"] = kinds.get("activations", 0)
        kinds["parameters"] = kinds.get("parameters", 0) - self._reference(choice)
        if choice.streamed:  # of the traced job all layers are
            kinds["parameters"] += (1 - choice.streamed) * self._streamed[0]
        if name.startswith(GENERATION):
            growing = 0  # a cache, which nothing compresses or moves
        if choice.inputs_offloaded:
            kinds["activations"] -= growing * choice.checkpointed
        if "8bit" in choice.optim and "8bit" not in str(self.job.fields.get("optim")):
            kinds["optimizer_states"] = kinds.get("optimizer_states", 0) * self._states_8bit
        if choice.paged:
            kinds["optimizer_states"] = 0
        for knob in choice.on:
            knob.bytes(kinds, growing, self, choice)
        kinds["activations"] = max(0, kinds["activations"])
        if choice.accumulation > 1 and name.startswith(("forward", "backward")):
            kinds["gradients"] = max(kinds.get("gradients", 0), self._gradients())
        if not choice.engine.plain:
            kinds |= self._rank_bytes(choice)
            if name.startswith("optimizer"):  # a rank steps over its own part, or the host does
                kinds["workspace"] = kinds.get("workspace", 0) / self.job.world_size * (not choice.engine.offloads)
        elif choice.engine.replicates:
            wider = 2 if choice.dtype == "float32" != self.job.dtype else 1
            for kind in ("parameters", "gradients", "optimizer_states"):
                kinds[kind] = wider * kinds.get(kind, 0)
            kinds["communication"] = wider * self._gradients()  # buckets of all gradients

    def _gradients(self) -> float:
        return max(peak.by_kind.get("gradients", 0) for peak in self.plain[0].peaks.values())

    def _rank_bytes(self, choice: Choice) -> dict[str, float]:
        loaded, outside = self.loaded - self._reference(choice), 2 * self.outside_layers
        gathered = outside + 2 * max(0, loaded - outside) / count_layers(self.job.config)
        return choice.engine.rank_bytes(self.job.world_size, loaded, self.trained, self._gradients(), gathered)

    def activations(self, choice: Choice) -> float:
        """Bytes of a micro-batch that are kept between forward and backward, in all layers."""
        growing = 0.0
        for share, (single, double) in self.shares(choice):
            samples = [max(traced.growing.values(), default=0) for traced in (single, double)]
            growing += share * (samples[1] - samples[0]) * self.samples(choice)
        return growing


def _split(kinds: dict[str, float]) -> tuple[float, float]:
    """Bytes that there are whatever the micro-batch is, and those that its samples take."""
    moving = kinds.get("activations", 0) + kinds.get("logits", 0) + kinds.get("other", 0)
    return sum(kinds.values()) - moving, moving


def _line(single: dict[str, int], double: dict[str, int], samples: float) -> dict[str, float]:
    """Draw the line through one sample and two, by kind."""
    line = {}
    for kind in single.keys() | double.keys():
        first, second = single.get(kind, 0), double.get(kind, 0)
        line[kind] = max(min(first, second) * min(1, samples), first + (second - first) * (samples - 1))
    return line


def baselines(build: Callable[..., Job], shares: set[float], fewest: int = 1) -> list[Job]:
    """The four jobs to trace; two where all choices checkpoint every layer, or none does.

    Args:
        build: makes the job of a number of samples, with all layers checkpointed or none.
        shares: of checkpointed layers that the choices have.
        fewest: samples that a micro-batch may have; the larger ones have twice as many.
    """
    needed = [checkpointed for checkpointed in (False, True) if shares != {float(not checkpointed)}]
    return [build(samples, checkpointed) for checkpointed in needed for samples in (fewest, 2 * fewest)]


def make_sketch(jobs: list[Job], traces: list[Traced]) -> Sketch:
    """The sketch from the traces of baselines()."""
    outside, layer = jobs[0].elements(trained=True)
    trained = outside + layer * count_layers(jobs[0].config)
    return Sketch(jobs[0], (traces[0], traces[1]), (traces[-2], traces[-1]), trained)


def sketched_estimate(
    sketch: Sketch, choice: Choice, job: Job, device_bytes: int, seconds: float, generation: float | None
) -> Estimate:
    """An Estimate with what a sketch knows.

    Args:
        job: the choice's.
        device_bytes: of the sketch, with its caution, which counts as reserved.
        seconds: of an optimizer step.
        generation: of these, in which completions are generated; None where none are.
    """
    kinds = {name: sketch.kinds(name, choice) for name in sketch.plain[0].peaks}
    peaks = {name: int(sum(sizes.values())) for name, sizes in kinds.items()}
    segment = max(peaks, key=peaks.__getitem__)
    phases: dict[str, int] = {}
    for name, peak in peaks.items():
        phases[phase_of(name)] = max(peak, phases.get(phase_of(name), 0))
    staged = 0 if job.quantization_config is not None else sketch.loaded
    held = max(sketch.host_bytes(choice), staged) if job.device.discrete_memory else device_bytes
    host_bytes = int(held + constant("host_process_bytes", job.device).value)
    estimate = Estimate(
        peak_allocated_bytes=peaks[segment],
        peak_reserved_bytes=device_bytes - overheads.context(job.device),
        device_bytes=device_bytes,
        host_bytes=host_bytes,
        phase=phase_of(segment),
        estimated=job.in_words(main_attention(job) or "sdpa"),
        breakdown={kind: int(kinds[segment].get(kind, 0)) for kind in KINDS},
        phases=phases,
        capacity_bytes=capacity(job),
        training_arguments=written(job.fields),
        notes=(),
    )
    if reason := unknown_speed(job):
        return with_speed(estimate, None, f"speed: {reason}")
    speed = Throughput.of(job, seconds, None, generation)
    return with_speed(estimate, speed, speed_note(job.device, speed))
