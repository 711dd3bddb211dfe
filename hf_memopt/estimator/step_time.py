"""Seconds of an optimizer step beside its kernels: what engines exchange, offload and add to matmuls.

Estimates and plans ask the same functions. benchmarks/speed_published.py compares the result with published speeds.
"""

import functools
from dataclasses import dataclass

from hf_memopt.engines import Engine
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.catalog import DEVICES_PER_HOST
from hf_memopt.hardware.measured import constant, measured_value

GB = 1e9
# Shares of the catalog's rates that training reaches, and their sources: hardware.constants. What is here is of hosts.
# ZeRO-Offload (Ren et al. 2021), table 4: Adam on 1e9 weights in 0.22 s, on the host's two sockets.
HOST_ADAM = 1e9 / 0.22  # weights a second, of all devices of a host together
# Where devices have links of their own: one 400 Gb/s adapter a GPU (NVIDIA DGX H100), 200 Gb/s before fp8 (DGX A100).
BETWEEN_HOSTS = {True: 50 * GB, False: 25 * GB}
ETHERNET = 12.5 * GB  # assumed of machines whose devices talk over PCIe: 100 Gb/s
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
        micro_matmuls: the number of matmuls among them.
        optimizer_seconds: of the optimizer's kernels, over all weights.
        optimizer_offloaded: its states are in host memory without an engine.
    """

    engine: Engine
    accumulation: int
    micro_seconds: float
    micro_matmuls: float
    optimizer_seconds: float
    optimizer_offloaded: bool = False


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of the steps of one model on one kind of device.

    Attributes:
        world_size: processes, one device each.
        trained: number of weights that are trained.
        loaded: bytes of all weights.
        drives: NVMe drives of each machine that share what is offloaded to disk.
    """

    device: Hardware
    world_size: int
    trained: int
    loaded: int
    drives: int = 1

    def seconds(self, step: Step) -> float:
        """One optimizer step."""
        exchange_micro, exchange_step = self.exchanged(step)
        micro = self._overlapped(step.micro_seconds, exchange_micro) + self._gathering(step)
        return self._overlapped(step.accumulation * micro, exchange_step) + self._optimizer(step)

    def exchanged(self, step: Step) -> tuple[float, float]:
        """Seconds that devices exchange weights and gradients, per micro-batch and per step."""
        ranks, engine, weights = self.world_size, step.engine, self.loaded
        if ranks == 1:
            return 0.0, 0.0
        sent = (ranks - 1) / ranks
        micro, once = (size * sent / self._link for size in engine.exchanged(weights, 2.0 * self.trained))
        if not engine.offloads or not engine.shards_gradients:
            return micro, once
        if engine.shards_weights:
            micro += 2 * weights / ranks / self._host_link
            if engine.offload == "nvme":
                micro += self._disk(2 * max(0.0, weights - 2 * IN_HOST * ranks), 0.0)
        return micro + self._summed_on_host(step), once

    def _gathering(self, step: Step) -> float:
        """Seconds a micro-batch that sharding adds around matmuls: hooks, launches and waits for gathered weights."""
        return step.micro_matmuls * self._sharded_matmul if step.engine.shards_weights else 0.0

    def _summed_on_host(self, step: Step) -> float:
        """Seconds a micro-batch in which gradients come from the host, are added to and go back.

        DeepSpeed keeps a process's part of them where its states are (stage3.py, partition_grads; stage_1_and_2.py
        likewise). The first micro-batch of a step has nothing to add to, and the last copy is the optimizer's.
        """
        later = (step.accumulation - 1) / step.accumulation
        return later * 4 * self.trained / self.world_size / self._host_link

    def _optimizer(self, step: Step) -> float:
        ranks, engine = self.world_size, step.engine
        if step.optimizer_offloaded or engine.offloads:
            there_and_back = 2 * 2 * self.trained / ranks / self._host_link
            adam = self.trained / ranks * min(ranks, DEVICES_PER_HOST) / HOST_ADAM
            if engine.offload == "nvme":
                adam = self._overlapped(adam, self._disk(STEP_READS * self.trained, STEP_WRITES * self.trained))
            return there_and_back + adam
        return step.optimizer_seconds / (1 if engine.plain else ranks)

    def _disk(self, read: float, written: float) -> float:
        """Seconds for the machines to read and write so many bytes of the whole job, each its share."""
        machines = -(-self.world_size // DEVICES_PER_HOST)
        return (read / DISK_READ + written / DISK_WRITE) / machines / self.drives

    def _overlapped(self, computing: float, moving: float) -> float:
        return max(computing, moving) + self._exposed * min(computing, moving)

    @functools.cached_property
    def _link(self) -> float:
        """Bytes/s from device to device."""
        device = self.device
        efficiency = constant("link_efficiency", device).value
        peer = device.peer_link * efficiency if device.peer_link else self._host_link
        if self.world_size <= DEVICES_PER_HOST:
            return peer
        linked = (device.peer_link or 0) > (device.host_link or 0)
        return min(peer, (BETWEEN_HOSTS[device.fp8] if linked else ETHERNET) * efficiency)

    @functools.cached_property
    def _host_link(self) -> float:
        return host_link(self.device)

    @functools.cached_property
    def _exposed(self) -> float:
        return constant("exposed_traffic", self.device).value

    @functools.cached_property
    def _sharded_matmul(self) -> float:
        return constant("sharded_matmul_seconds", self.device).value


def host_link(device: Hardware) -> float:
    """Bytes/s between a device and its host."""
    if (measured := measured_value("host_link_bytes_per_second", device)) is not None:
        return measured
    rate = device.host_link or constant("unknown_host_link", device).value
    return rate * constant("link_efficiency", device).value
