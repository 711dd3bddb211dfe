"""Seconds in which a step of GRPO or RLOO writes completions and scores them, beside its training step.

A decode pass writes the next token of every completion in flight: it reads all weights, and of each completion the
keys and values so far. The longest completion decides how many passes there are. throughput.py and planner.cost ask
the same functions; benchmarks/speed_generated.py compares steps with published ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_memopt.estimator.accounting.ledger import Peak
from hf_memopt.estimator.colocation import OWN_MEMORY, cache_bytes, colocates, engine_weights, utilization
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.timing.speed import memory_rate
from hf_memopt.estimator.timing.step_time import host_link
from hf_memopt.estimator.tracing.extrapolate import count_layers
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.links import Links
from hf_memopt.hardware.measured import constant

FORWARD = 1 / 3  # of a micro-batch's time; backward has twice its matmuls
# A generation's longest completion is so many times its mean, where the limit lets it: 2.8, 2.7 and 2.8 in three of
# verl's logs (GSM8K; benchmarks/data/published_generated.json: longest_completion_tokens).
LONGEST = 3.0
# What a pass of vLLM takes beside reading at the rate of copies: 6.5 ms of Llama-3.1-8B on an H200 and 16.2 ms of 70B
# on four (vLLM's benchmarks 9515), 4.2 ms of Qwen3-4B on a B200 (unsloth pull request 5108), 10.4 ms on an RTX 4090
# (tt-inference-server issue 394) are within 20 % of 70 µs a layer.
PASS_OF_LAYER = 70e-6
# TRL's own log (issue 4086): 0.3 s to wake up, 1.3 to 1.6 s to fall asleep.
SLEEPING = 1.75
_SERVER_SHARE = 0.9  # of a server's card: vllm_gpu_memory_utilization of `trl vllm-serve` (TRL 1.16)


class Lengths(NamedTuple):
    """Tokens of a prompt, of a completion in the mean, and of the longest."""

    prompt: float
    mean: float
    longest: float


class Rollout(NamedTuple):
    """Seconds of an optimizer step: its completions are generated, and scored by forward passes."""

    generation: float
    scoring: float


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """What writes completions: one copy of the model.

    Attributes:
        device: on `cards` of which the copy is divided evenly.
        weights: bytes that each reads in a pass.
        cache: bytes of a token's keys and values on each.
        room: bytes for them on each; None where all completions are in flight at once.
        token_seconds: in which one card computes a token of a large batch.
        beside: seconds of a pass beside reading and computing.
        launching: seconds in which the host launches a pass; the device waits for it.
        padded: completions that have ended are computed until the longest has.
    """

    device: Hardware
    cards: int = 1
    weights: float
    cache: float
    room: float | None = None
    token_seconds: float = 0.0
    beside: float = 0.0
    launching: float = 0.0
    padded: bool = False

    def in_flight(self, completions: float, lengths: Lengths) -> float:
        """Completions whose keys and values there is room for, when they have ended; vLLM keeps others waiting."""
        if self.room is None:
            return completions
        return min(completions, max(1.0, self.room / (self.cache * (lengths.prompt + lengths.mean))))

    def seconds(self, completions: float, lengths: Lengths, prompts: float | None = None) -> float:
        """Seconds until the last of some completions has ended.

        The copy computes the prompts (prefill). Then there is a pass for each token of the longest, and where not all
        are in flight, one for each mean length of those that wait. A pass takes as long as it reads the weights at the
        rate of copies or computes one token a completion (the roofline of Pope et al. 2022, Efficiently Scaling
        Transformer Inference, section 2), and reads the keys and values of prompts and of half the tokens written.

        Args:
            prompts: different ones, which vLLM's prefix cache computes once.
        """
        copies = constant("copy_efficiency", self.device).value / constant("bandwidth_efficiency", self.device).value
        rate = memory_rate(self.device) * copies
        mean = lengths.longest if self.padded else lengths.mean
        waves = completions / self.in_flight(completions, lengths)
        passes = mean * (waves - 1) + lengths.longest
        tokens = completions * mean / passes  # of a pass
        token = self.token_seconds / self.cards
        context = lengths.prompt + (mean + lengths.longest) / 4  # a mean over tokens: half of equal lengths
        reading = max(self.weights / rate, tokens * token) + tokens * context * self.cache / rate
        prefill = (completions if prompts is None else prompts) * lengths.prompt * token
        return prefill + passes * max(reading + self.beside, self.launching)


def lengths_of(job: Job) -> Lengths:
    """The lengths of a job's samples: the longest completion reaches max_completion_length, as its memory is
    predicted, and the mean is a LONGESTth of that, where nothing says how long the run's are."""
    longest = job.trainer.max_completion_length
    return Lengths(max(1, job.seq_len - longest), longest / LONGEST, longest)


def rollout_time(
    job: Job, peaks: Mapping[str, Peak], forward: float, launching: float, fields: Mapping[str, Any] | None = None
) -> Rollout:
    """Seconds of an optimizer step in which TRL's trainer generates and scores (trl 1.16, _prepare_inputs and
    _generate_and_score_completions of GRPOTrainer and RLOOTrainer).

    A generation serves steps_per_generation × num_iterations micro-batches. Where those are not whole parts of an
    optimizer step, where vLLM writes, and always in RLOO, the model scores them once more; and where beta is not 0 the
    reference model does, or the model without its adapters.

    Args:
        peaks: of a process that holds the whole model.
        forward: seconds of a micro-batch's forward pass on the device.
        launching: seconds in which the host launches it.
        fields: in place of the job's.
    """
    fields, trainer = {**job.fields, **(fields or {})}, job.trainer
    micro, accumulation = fields["per_device_train_batch_size"], fields["gradient_accumulation_steps"]
    at_once = fields.get("steps_per_generation") or accumulation
    served = at_once * fields.get("num_iterations", trainer.num_iterations)
    completions, lengths = micro * at_once, lengths_of(job)
    token = forward / (micro * job.seq_len)
    if trainer.use_vllm:
        seconds = _by_vllm(job, peaks, fields, completions, lengths, token)
    else:
        decoder = Decoder(
            device=job.device,
            weights=_own_weights(job, peaks),
            cache=cache_bytes(job.config),
            token_seconds=token,
            beside=_gathering(job, peaks),
            launching=launching,
            padded=True,
        )
        seconds = decoder.seconds(completions, lengths)
    # RLOO has no such field: it always computes them.
    corrected = getattr(trainer, "vllm_importance_sampling_correction", None)
    old = corrected is None or accumulation % served != 0 or (trainer.use_vllm and corrected)
    passes = old + (fields.get("beta", trainer.beta) != 0)
    share = accumulation / served  # of a generation batch that a step trains on for the first time
    return Rollout(share * seconds, share * at_once * passes * max(forward, launching))


def _by_vllm(
    job: Job, peaks: Mapping[str, Peak], fields: Mapping[str, Any], completions: int, lengths: Lengths, token: float
) -> float:
    """Seconds of a generation by vLLM. A server is taken to have vllm_tensor_parallel_size cards of the same kind,
    which write the completions of all processes, and gets the weights through host memory."""
    shares_card = colocates(fields)
    cards, layers = fields.get("vllm_tensor_parallel_size", 1), count_layers(job.config)
    weights = engine_weights(job, dict(peaks))
    used = utilization(fields) if shares_card else _SERVER_SHARE
    engine_completions = completions * (cards if shares_card else job.world_size)
    exchanged = 2 * layers * 2 * job.config.get_text_config().hidden_size * engine_completions  # two sums a layer
    decoder = Decoder(
        device=job.device,
        cards=cards,
        weights=weights,
        cache=cache_bytes(job.config) / cards,
        room=used * job.device.memory / OWN_MEMORY - weights,
        token_seconds=token,
        beside=layers * PASS_OF_LAYER + Links(job.device, cards).seconds(exchanged, 2 * layers),
    )
    prompts = engine_completions / fields.get("num_generations", job.trainer.num_generations)
    seconds = decoder.seconds(engine_completions, lengths, prompts)
    if not shares_card:
        return seconds + weights * cards / host_link(job.device)
    return seconds + (SLEEPING if fields.get("vllm_enable_sleep_mode") else 0.0)


def _own_weights(job: Job, peaks: Mapping[str, Peak]) -> float:
    """Bytes that a pass of the trained model reads and writes for its weights: layers in 4 bits become 16 bits in
    every pass (bitsandbytes, dequantize_4bit), which are written and read."""
    outside, layer = job.elements()
    layers = count_layers(job.config)
    if job.quantization_config is not None:
        return peaks["load"].by_kind["parameters"] + 8 * layer * layers  # of elements that hold two weights each
    return (outside + layer * layers) * getattr(torch, job.dtype).itemsize


def _gathering(job: Job, peaks: Mapping[str, Peak]) -> float:
    """Seconds in which a pass of a sharded model gathers its weights."""
    if not job.engine.shards_weights:
        return 0.0
    return Links(job.device, job.world_size).seconds(_own_weights(job, peaks), count_layers(job.config) + 1)


def generation_note(share: float) -> str:
    """The share of a step that is generation, and what is taken for granted of it."""
    return (
        f"generation: {share:.0%} of a step's time, with the longest completion at max_completion_length and a "
        f"mean of {1 / LONGEST:.0%} of that"
    )
