"""A roofline model of an optimizer step's time, which ranks choices; only ratios of its seconds mean something.

Every kernel of the traced step takes the longest of its FLOPs at the device's rate, its bytes at the memory's, and a
launch. Checkpointed layers' second forward is traced like the first. Engines' traffic and offloading are added.
"""

import functools
from collections import Counter
from dataclasses import dataclass

from hf_memopt.compatibility.engine import split_strategy
from hf_memopt.estimator.accounting.work import Kernel
from hf_memopt.hardware import Hardware
from hf_memopt.hardware.catalog import DEVICES_PER_HOST
from hf_memopt.hardware.constants import SPEEDS, show
from hf_memopt.hardware.measured import constant, measured_on, measured_value
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.sketch import Sketch, Traced

GB = 1e9
# Shares of the catalog's rates that training reaches, and their sources: hardware.constants. What is here is of hosts.
# ZeRO-Offload (Ren et al. 2021), table 4: Adam on 1e9 weights in 0.22 s, on the host's two sockets.
HOST_ADAM = 1e9 / 0.22  # weights a second, of all devices of a host together
# One 400 Gb/s adapter a GPU (NVIDIA DGX H100), 200 Gb/s before (DGX A100).
BETWEEN_HOSTS = {True: 50 * GB, False: 25 * GB}
# One PCIe 4.0 drive a machine: Samsung's sequential rates of the 990 PRO, bytes a second. Sustained writes are slower.
DISK_READ, DISK_WRITE = 7.45 * GB, 6.9 * GB
# What DeepSpeed's ZeRO-3 swaps of every trained weight in a step (swap_tensor/pipelined_optimizer_swapper.py): fp32
# master, both states and gradient are read; these and the 16-bit weight are written.
STEP_READS, STEP_WRITES = 16, 18
IN_HOST = 1e9  # weights of a process that stay in host memory: max_in_cpu of the shipped zero3_offload_nvme.json
# Eager kernels on a CPU: 1.44 of the plain step's time (benchmarks/results/levers.json).
COMPRESSION_ON_CPU = 0.44
# A choice that rounds values must be faster than an exact one by more than this.
APPROXIMATION = 1.05
# The same for one that needs host memory and its link, which other programs may be using.
OFFLOAD = 1.10
LEVER = 1.002  # for every memory feature, so that of equally fast choices the one with fewest wins


@dataclass(frozen=True)
class Cost:
    """Predicted times of choices on one device, in seconds whose ratios alone mean something.

    Args:
        sketch: of the job.
        drives: NVMe drives of each machine that share what is offloaded to disk.
    """

    sketch: Sketch
    drives: int = 1

    @functools.cached_property
    def _times(self) -> dict[int, tuple[float, float]]:
        device = self.sketch.job.device
        return {id(found): times(found, device) for found in (*self.sketch.kept, *self.sketch.checkpointed)}

    def step(self, choice: Choice) -> float:
        """One optimizer step."""
        micro = self._micro(choice)
        moved = self._offloaded(choice, micro)
        exchange_micro, exchange_step = self._exchanged(choice)
        micro = self._overlapped(micro + moved, exchange_micro)
        return self._overlapped(choice.accumulation * micro, exchange_step) + self._optimizer(choice)

    def rank(self, choice: Choice) -> float:
        """The sort key: the step's time with penalties for rounding, offloading and, a little, for every feature."""
        penalty = APPROXIMATION**choice.approximations * OFFLOAD**choice.offloads * LEVER**choice.levers
        return self.step(choice) * penalty

    def _micro(self, choice: Choice) -> float:
        device, seconds = self.sketch.job.device, 0.0
        for share, pair in (
            (1 - choice.checkpointed, self.sketch.kept),
            (choice.checkpointed, self.sketch.checkpointed),
        ):
            one, two = (self._times[id(found)][0] for found in pair)
            seconds += share * max(one, one + (two - one) * (choice.micro_batch - 1))
        if choice.compressed:
            if device.backend == "cpu":
                seconds *= 1 + COMPRESSION_ON_CPU
            else:  # read and written at half the width, twice
                seconds += 3 * self.sketch.activations(choice) / _bandwidth(device)
        return seconds

    def _offloaded(self, choice: Choice, micro: float) -> float:
        """Seconds that a micro-batch waits for activations that are copied while it computes."""
        if not (choice.activations_offloaded or choice.inputs_offloaded):
            return 0.0
        size = self.sketch.activations(choice) * (0.5 if choice.compressed else 1)
        moving = 2 * size / _host_link(self.sketch.job.device)
        return self._overlapped(micro, moving) - micro

    def _exchanged(self, choice: Choice) -> tuple[float, float]:
        """Seconds that devices exchange weights and gradients, per micro-batch and per step."""
        ranks = self.sketch.job.world_size
        if ranks == 1:
            return 0.0, 0.0
        link = self._link()
        gradients, weights = 2.0 * self.sketch.trained, self.sketch.loaded
        kept = (ranks - 1) / ranks
        host = self._summed_on_host(choice)
        if choice.strategy == "ddp":
            return 0.0, 2 * 2 * gradients * kept / link  # fp32, reduced and spread
        if choice.strategy == "fsdp2":
            return (2 * weights + 2 * gradients) * kept / link, 0.0
        if choice.zero_stage == 3:
            moved = (2 * weights + gradients) * kept / link
            if "offload" in choice.strategy:
                moved += 2 * weights / ranks / _host_link(self.sketch.job.device)
            if choice.strategy.endswith("nvme"):
                moved += self._disk(2 * max(0.0, weights - 2 * IN_HOST * ranks), 0.0)
            return moved + host, 0.0
        if choice.zero_stage == 2:  # gradients go to their owner after every micro-batch
            return gradients * kept / link + host, gradients * kept / link
        return 0.0, 2 * gradients * kept / link

    def _summed_on_host(self, choice: Choice) -> float:
        """Seconds a micro-batch in which gradients come from the host, are added to and go back.

        DeepSpeed keeps a process's part of them where its states are (stage3.py, partition_grads; stage_1_and_2.py
        likewise). The first micro-batch of a step has nothing to add to, and the last copy is the optimizer's.
        """
        if "offload" not in choice.strategy:
            return 0.0
        later = (choice.accumulation - 1) / choice.accumulation
        return later * 4 * self.sketch.trained / self.sketch.job.world_size / _host_link(self.sketch.job.device)

    def _link(self) -> float:
        device = self.sketch.job.device
        efficiency = constant("link_efficiency", device).value
        peer = device.peer_link * efficiency if device.peer_link else _host_link(device)
        if self.sketch.job.world_size <= DEVICES_PER_HOST:
            return peer
        return min(peer, BETWEEN_HOSTS[device.fp8] * efficiency)

    def _optimizer(self, choice: Choice) -> float:
        ranks = self.sketch.job.world_size
        device = self.sketch.job.device
        seconds = self._times[id(self.sketch.kept[0])][1]
        if choice.engine in ("deepspeed", "fsdp2"):
            seconds /= ranks
        if choice.optimizer_offloaded or split_strategy(choice.strategy)[1] != "none":
            there_and_back = 2 * 2 * self.sketch.trained / ranks / _host_link(device)
            adam = self.sketch.trained / ranks * min(ranks, DEVICES_PER_HOST) / HOST_ADAM
            if choice.strategy.endswith("nvme"):
                swapped = self._disk(STEP_READS * self.sketch.trained, STEP_WRITES * self.sketch.trained)
                adam = self._overlapped(adam, swapped)
            return there_and_back + adam
        return seconds

    def _overlapped(self, computing: float, moving: float) -> float:
        """Seconds of computation and copies that overlap."""
        exposed = constant("exposed_traffic", self.sketch.job.device).value
        return max(computing, moving) + exposed * min(computing, moving)

    def _disk(self, read: float, written: float) -> float:
        """Seconds for the machines to read and write so many bytes of the whole job, each its share."""
        machines = -(-self.sketch.job.world_size // DEVICES_PER_HOST)
        return (read / DISK_READ + written / DISK_WRITE) / machines / self.drives


def times(found: Traced, device: Hardware) -> tuple[float, float]:
    """Seconds of a micro-batch and of an optimizer step."""
    return _times(found.kernels, device, False), _times(found.kernels, device, True)


def _times(kernels: Counter[Kernel], device: Hardware, optimizer: bool) -> float:
    rate, bandwidth = _rate(device), _bandwidth(device)
    launch = constant("launch_seconds", device).value
    return constant("step_time_ratio", device).value * sum(
        count * max(kernel.flops / rate, kernel.bytes / bandwidth, launch)
        for kernel, count in kernels.items()
        if kernel.optimizer == optimizer
    )


def _rate(device: Hardware) -> float:
    if (measured := measured_value("matmul_flops_per_second", device)) is not None:
        return measured
    if known := device.bf16_flops or device.fp16_flops:
        return known * constant("matmul_efficiency", device).value
    return constant("flops_per_byte", device).value * _bandwidth(device)


def _bandwidth(device: Hardware) -> float:
    if (measured := measured_value("bandwidth_bytes_per_second", device)) is not None:
        return measured
    known = device.bandwidth or constant("unknown_bandwidth", device).value
    return known * constant("bandwidth_efficiency", device).value


def _host_link(device: Hardware) -> float:
    if (measured := measured_value("host_link_bytes_per_second", device)) is not None:
        return measured
    known = device.host_link or constant("unknown_host_link", device).value
    return known * constant("link_efficiency", device).value


def speed_note(device: Hardware) -> str | None:
    """What of this device's rates was measured on it; None where nothing was."""
    file = measured_on(device)
    rates = [show(name, file.constants[name]) for name in SPEEDS if name in file.constants] if file else []
    return f"speed: {', '.join(rates)}: {file.source}" if rates else None
