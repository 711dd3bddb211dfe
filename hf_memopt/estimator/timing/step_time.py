"""Seconds of an optimizer step beside its kernels: what engines exchange, offload and add to matmuls.

Estimates and plans ask the same functions. benchmarks/speed_published.py compares the result with published speeds.
"""

import functools
from dataclasses import dataclass

from hf_memopt.engines import Engine
from hf_memopt.estimator.job import Job
from hf_memopt.estimator.job_checks import attention_heads
from hf_memopt.estimator.tracing.extrapolate import count_layers
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.catalog import DEVICES_PER_HOST, GB
from hf_memopt.hardware.links import Links
from hf_memopt.hardware.measured import constant, measured_value

# Shares of the catalog's rates that training reaches, and their sources: hardware.constants. What is here is of hosts.
# ZeRO-Offload (Ren et al. 2021), table 4: Adam on 1e9 weights in 0.22 s, on the host's two sockets.
HOST_ADAM = 1e9 / 0.22  # weights a second, of all devices of a host together
# One PCIe 4.0 drive a machine: Samsung's sequential rates of the 990 PRO, bytes a second. Sustained writes are slower.
DISK_READ, DISK_WRITE = 7.45 * GB, 6.9 * GB
# What DeepSpeed's ZeRO-3 swaps of every trained weight in a step (swap_tensor/pipelined_optimizer_swapper.py): fp32
# master, both states and gradient are read; these and the 16-bit weight are written.
STEP_READS, STEP_WRITES = 16, 18
IN_HOST = 1e9  # weights of a process that stay in host memory: max_in_cpu of the shipped zero3_offload_nvme.json


@dataclass(frozen=True, kw_only=True)
class Step:
    """The work of an optimizer step.

    Attributes:
        accumulation: micro-batches.
        micro_seconds: of a micro-batch's kernels and of the waits for what it offloads.
        launch_seconds: in which the host launches these kernels.
        optimizer_seconds: of the optimizer's kernels, over all weights.
        optimizer_offloaded: its states are in host memory without an engine.
        paged_bytes: of its states, where the device has no room for all of them.
    """

    engine: Engine
    accumulation: int
    micro_seconds: float
    launch_seconds: float
    optimizer_seconds: float
    optimizer_offloaded: bool = False
    paged_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the steps of one model on one kind of device.

    Attributes:
        world_size: processes, one device each.
        trained: number of weights that are trained.
        loaded: bytes of all weights.
        wide: weights are loaded in 32 bits.
        mixed: autocast computes in 16 bits.
        adapters: alone are trained; peft keeps them in 32 bits.
        layers: whose weights are gathered and whose gradients are reduced at a time.
        drives: NVMe drives of each machine that share what is offloaded to disk.
        shared: processes that share the tokens of a sample.
        sent: bytes that each sends of a micro-batch for it, in `messages` of an equal part.
    """

    device: Hardware
    world_size: int
    trained: int
    loaded: int
    wide: bool
    mixed: bool
    adapters: bool
    layers: int
    drives: int = 1
    shared: int = 1
    sent: int = 0
    messages: int = 0

    @classmethod
    def of(cls, job: Job, trained: int, loaded: int, drives: int = 1) -> "StepTime":
        """The times of a job's steps."""
        return cls(
            device=job.device,
            world_size=job.world_size,
            trained=trained,
            loaded=loaded,
            wide=job.dtype == "float32",
            mixed=bool(job.fields.get("bf16") or job.fields.get("fp16")),
            adapters=job.peft_config is not None,
            layers=count_layers(job.config),
            drives=drives,
            shared=job.shared,
            **_sent_for_sharing(job),
        )

    def seconds(self, step: Step) -> float:
        """One optimizer step."""
        exchange_micro, exchange_step = self.exchanged(step)
        launching = step.launch_seconds * (self._sharded_launch if step.engine.shards_weights else 1)
        sharing = Links(self.device, self.shared).seconds(self.sent, self.messages)
        micro = self.overlapped(self.overlapped(step.micro_seconds, launching) + sharing, exchange_micro)
        return self.overlapped(step.accumulation * micro, exchange_step) + self._optimizer(step)

    def exchanged(self, step: Step) -> tuple[float, float]:
        """Seconds that devices exchange weights and gradients, per micro-batch and per step."""
        ranks, engine, weights = self.world_size, step.engine, self.loaded
        if ranks == 1:
            return 0.0, 0.0
        micro, once = (
            sum(
                self._links.seconds(exchange.size, self.layers + 1, exchange.in_box)
                for exchange in engine.exchanged(*self._sizes(engine))
                if exchange.per_step == per_step
            )
            for per_step in (False, True)
        )
        if not engine.offloads or not engine.shards_gradients:
            return micro, once
        if engine.shards_weights:
            # FSDP2's fp32 weights are narrowed on the device (torch 2.13, FSDPParam.all_gather_inputs).
            widened = 0 if self.wide or self.adapters or not engine.fsdp_version else 2 * self.trained
            micro += 2 * (weights + widened) / ranks / self._host_link
            if engine.offload == "nvme":
                micro += self._disk(2 * max(0.0, weights - 2 * IN_HOST * ranks), 0.0)
        return micro + self._summed_on_host(step), once

    def _sizes(self, engine: Engine) -> tuple[float, float]:
        """Bytes of weights and gradients as they are sent: under mixed precision sharding engines send 16 bits
        (accelerate's MixedPrecisionPolicy, DeepSpeed's communication_data_type), DDP gradients as they are."""
        if engine.plain:
            return self.loaded, self.trained * (4 if self.wide or self.adapters else 2)
        narrowed = self.wide and self.mixed
        return self.loaded / (2 if narrowed else 1), self.trained * (2 if narrowed or not self.wide else 4)

    def _summed_on_host(self, step: Step) -> float:
        """Seconds a micro-batch in which gradients come from the host, are added to and go back.

        DeepSpeed keeps a process's part of them where its states are (stage3.py, partition_grads; stage_1_and_2.py
        likewise). The first micro-batch of a step has nothing to add to, and the last copy is the optimizer's. FSDP2's
        go to the host in fp32 and are added there (torch 2.13, _fsdp_collectives.foreach_reduce).
        """
        share = 1 if step.engine.fsdp_version else (step.accumulation - 1) / step.accumulation
        return share * 4 * self.trained / self.world_size / self._host_link

    def _optimizer(self, step: Step) -> float:
        ranks, engine = self.world_size, step.engine
        if step.optimizer_offloaded or engine.offloads:
            there_and_back = 0 if engine.fsdp_version else 2 * 2 * self.trained / ranks / self._host_link
            adam = self.trained / ranks * min(ranks, DEVICES_PER_HOST) / HOST_ADAM
            if engine.offload == "nvme":
                adam = self.overlapped(adam, self._disk(STEP_READS * self.trained, STEP_WRITES * self.trained))
            return there_and_back + adam
        # The kernels read all states in turn, so the pages that left longest ago are the next: all come and go, at
        # once: 16 GB both ways took less than 0.9 s of torchtune's 8B on an RTX 4090, whatever its matmuls reached.
        paging = step.paged_bytes / self._host_link
        return step.optimizer_seconds / (1 if engine.plain else ranks) + paging

    def _disk(self, read: float, written: float) -> float:
        """Seconds for the machines to read and write so many bytes of the whole job, each its share."""
        machines = -(-self.world_size // DEVICES_PER_HOST)
        return (read / DISK_READ + written / DISK_WRITE) / machines / self.drives

    def overlapped(self, computing: float, moving: float) -> float:
        """Seconds of computation and copies that overlap."""
        return max(computing, moving) + self._exposed * min(computing, moving)

    @functools.cached_property
    def _links(self) -> Links:
        return Links(self.device, self.world_size)

    @functools.cached_property
    def _host_link(self) -> float:
        return host_link(self.device)

    @functools.cached_property
    def _exposed(self) -> float:
        return constant("exposed_traffic", self.device).value

    @functools.cached_property
    def _sharded_launch(self) -> float:
        return constant("sharded_launch_ratio", self.device).value


def _sent_for_sharing(job: Job) -> dict[str, int]:
    """StepTime's `sent` and `messages` of a job.

    In every layer's forward pass queries, keys, values and outputs are exchanged one after the other, and in backward
    their gradients (deepspeed 0.19, UlyssesSPAttentionHF). Around a ring each process gathers the others' keys and
    values, again in backward, where their gradients in fp32 go around (torch 2.13, _templated_ring_attention).
    """
    if job.shared == 1:
        return {}
    text, (heads, keys) = job.config.get_text_config(), attention_heads(job.config)
    width = (getattr(text, "head_dim", None) or text.hidden_size // heads) * job.micro_batch_tokens
    checkpointed = bool(job.fields.get("activation_checkpointing") or job.engine.checkpointing)
    layers = count_layers(job.config)
    if job.shares_heads:
        passes = layers * (2 + checkpointed)
        return {"sent": passes * 2 * width * (2 * heads + 2 * max(keys, job.shared)), "messages": 4 * passes}
    sent = ((2 + checkpointed) * 2 + 4) * 2 * keys * width * job.shared
    return {"sent": layers * sent, "messages": layers * (2 + checkpointed + job.shared)}


def host_link(device: Hardware) -> float:
    """Bytes/s between a device and its host."""
    if (measured := measured_value("host_link_bytes_per_second", device)) is not None:
        return measured
    rate = device.host_link or constant("unknown_host_link", device).value
    return rate * constant("link_efficiency", device).value
