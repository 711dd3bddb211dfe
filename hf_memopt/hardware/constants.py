"""Assumptions about devices beside the catalog's figures: one table, each row with its unit and its source.

`hf-memopt calibrate` measures some of them on the user's own card (hardware.measured), and its values go before these.
"""

import re
from dataclasses import dataclass

from hf_memopt.hardware.catalog import GB, Hardware
from hf_memopt.units import MIB

_CUDA = ("cuda", "rocm")
_FITTED = "fitted to published speeds on an A100 (benchmarks/speed_published.py)"
_BEST = (
    "stas00/ml-engineering, compute/accelerator/README.md; as far below it as an A100's 0.8 is below its 271 of 312"
)
_BEST_OF_USERS = (
    "zzc0721/torch-performance-test-data, database.md; as far below it as an A100's 0.8 is below its 264.5 of 312"
)
_FITTED_ADAPTERS = (
    "fitted to half of PEFT's published speeds on an L40S (benchmarks/speed_published.py: short batches of adapters)"
)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """A figure that predictions rest on.

    Attributes:
        source: where it was published or what was measured; "assumed" where it is neither.
        measured: on the device itself, by `hf-memopt calibrate`.
        backends: for which the row holds; None: for all.
        capability: lowest and highest CUDA compute capability for which it holds; None: all.
        architectures: AMD's gfx targets for which it holds; None: all.
        cards: a regular expression found in the labels of the cards for which it holds; None: all.
    """

    name: str
    value: float
    unit: str
    source: str
    measured: bool = False
    backends: tuple[str, ...] | None = None
    capability: tuple[float, float] | None = None
    architectures: tuple[str, ...] | None = None
    cards: str | None = None

    def applies_to(self, device: Hardware) -> bool:
        """True if the row holds for a device."""
        return (
            (self.backends is None or device.backend in self.backends)
            and (self.cards is None or re.search(self.cards, device.label) is not None)
            and (self.architectures is None or device.architecture in self.architectures)
            and (self.capability is None or self.capability[0] <= device.capability <= self.capability[1])
        )


def _matmul(share: float, source: str, **where) -> Constant:
    return Constant(name="matmul_efficiency", value=share, unit="share of the catalog's rate", source=source, **where)


# The first row that applies to a device counts.
TABLE = (
    Constant(
        name="context_bytes",
        value=764 * MIB,
        unit="bytes",
        source="measured beside ten training jobs on an H100 and an H200 (torch 2.11, CUDA 13.0, driver 580.159.04): "
        "benchmarks/results/gpu",
        backends=("cuda",),
        capability=(9.0, 9.9),
    ),
    # Whatever other card: since 1.13 torch has CUDA load kernels at their first use (CUDA_MODULE_LOADING=LAZY, pytorch
    # PR 86509). The 1343 MiB of transformers' guide of 2022 are all kernels at once, under CUDA 11.2.
    Constant(
        name="context_bytes",
        value=512 * MIB,
        unit="bytes",
        source="426 MiB where CUDA starts (torch 2.10, CUDA 13.0, RTX 6000 Ada: unslothai/unsloth-zoo PR 1053); "
        "86 MiB of kernels that a step loads are assumed",
        backends=_CUDA,
    ),
    Constant(
        name="context_bytes",
        value=0,
        unit="bytes",
        source="unified memory: what the process takes beside tensors is the host's",
    ),
    Constant(
        name="workspace_bytes",
        value=32 * MIB,
        unit="bytes",
        source="of one cuBLAS handle from Hopper on: parseChosenWorkspaceSize (torch, CublasHandlePool.cpp)",
        backends=("cuda",),
        capability=(9.0, 99.0),
    ),
    Constant(
        name="workspace_bytes",
        value=8_519_680,  # :4096:2:16:8, KiB × count
        unit="bytes",
        source="of one cuBLAS handle before Hopper: parseChosenWorkspaceSize (torch, CublasHandlePool.cpp)",
        backends=("cuda",),
    ),
    Constant(
        name="workspace_bytes",
        value=128 * MIB,
        unit="bytes",
        source="of one hipBLAS handle on gfx942 and gfx950: parseChosenWorkspaceSize (torch, CublasHandlePool.cpp)",
        backends=("rocm",),
        architectures=("gfx942", "gfx950"),
    ),
    Constant(
        name="workspace_bytes",
        value=32 * MIB,
        unit="bytes",
        source="of one hipBLAS handle: parseChosenWorkspaceSize (torch, CublasHandlePool.cpp)",
        backends=("rocm",),
    ),
    Constant(name="workspace_bytes", value=0, unit="bytes", source="assumed: none outside cuBLAS and hipBLAS"),
    Constant(
        name="host_process_bytes",
        value=2048 * MIB,
        unit="bytes",
        source="assumed: Python, torch, CUDA's host side and the data set's tables",
    ),
    Constant(
        name="free_memory_margin_bytes",
        value=1024 * MIB,
        unit="bytes",
        source="assumed: Python and torch themselves, and what other programs take while training runs",
        backends=("cpu",),
    ),
    Constant(
        name="free_memory_margin_bytes",
        value=256 * MIB,
        unit="bytes",
        source="assumed: what a desktop's windows may take while training runs",
    ),
    _matmul(0.6, "assumed: half to two thirds of what BLAS reaches in benchmarks", backends=("cpu",)),
    _matmul(0.58, f"an MI325X reaches 785 of 1307 TFLOP/s at best: {_BEST}", cards="MI325X"),
    _matmul(
        0.5,
        "of an MI300X: 620 of 1307 TFLOP/s in bf16 (SemiAnalysis, MI300X vs H100 vs H200 benchmark part 1, "
        "December 2024), 45 % by Ambati et al. 2025 (AMD MI300X GPU Performance Analysis)",
        backends=("rocm",),
        architectures=("gfx942",),
    ),
    _matmul(
        0.58, f"an MI355X reaches 1565 of 2500 TFLOP/s at best: {_BEST}", backends=("rocm",), architectures=("gfx950",)
    ),
    _matmul(
        1.0,
        "19 of these cards reach 1.06 of the catalog's rate at best (median), above the clocks that they are "
        f"sold with: {_BEST_OF_USERS}",
        cards=r"GeForce RTX [2-5]0\d0(?!.*Laptop)",
    ),
    _matmul(0.61, f"a T4 reaches 42 of 65 TFLOP/s in fp16 at best: {_BEST_OF_USERS}", cards="NVIDIA T4"),
    _matmul(0.55, f"an L4 reaches 71 of 121 TFLOP/s at best: {_BEST_OF_USERS}", cards=r"NVIDIA L4$"),
    _matmul(0.7, f"a V100 reaches 92 of 125 TFLOP/s in fp16 at best: {_BEST_OF_USERS}", cards="NVIDIA V100"),
    _matmul(0.62, f"an H100 PCIe reaches 496 of 756 TFLOP/s at best: {_BEST_OF_USERS}", cards="H100 PCIe"),
    _matmul(0.74, f"an H100 reaches 795 of 989 TFLOP/s at best: {_BEST}", backends=("cuda",), capability=(9.0, 9.9)),
    _matmul(
        0.71, f"a B200 reaches 1745 of 2250 TFLOP/s at best: {_BEST}", backends=("cuda",), capability=(10.0, 11.9)
    ),
    _matmul(
        0.7,
        "of an M4 Max: 12.3 to 14.8 of 18.4 TFLOP/s (zzc0721/torch-performance-test-data issue 65)",
        backends=("mps",),
    ),
    _matmul(0.8, f"{_FITTED}: beside the time in which the matmul reads and writes"),
    Constant(
        name="exposed_matmul_traffic",
        value=0.0,
        unit="share",
        source="assumed: a CPU's matmuls read ahead",
        backends=("cpu",),
    ),
    Constant(
        name="exposed_matmul_traffic",
        value=1.0,
        unit="share",
        source=f"{_FITTED}: of a matmul's bytes that are read and written before or after it computes",
    ),
    Constant(
        name="fp32_matmul_share",
        value=1.0,
        unit="share of the 16-bit rate",
        source="before tensor cores",
        backends=("cuda",),
        capability=(0.0, 6.9),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1 / 8,
        unit="share of the 16-bit rate",
        source="V100: 15.7 of 125 TFLOP/s, T4: 8.1 of 65 (NVIDIA's datasheets); without TF32",
        backends=("cuda",),
        capability=(7.0, 7.9),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1 / 16,
        unit="share of the 16-bit rate",
        source="A100: 19.5 of 312 TFLOP/s (NVIDIA's datasheet); without TF32, which torch leaves off",
        backends=("cuda",),
        capability=(8.0, 8.0),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1 / 15,
        unit="share of the 16-bit rate",
        source="H100 SXM: 67 of 989 TFLOP/s (NVIDIA's datasheet); without TF32",
        backends=("cuda",),
        capability=(9.0, 9.9),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1 / 28,
        unit="share of the 16-bit rate",
        source="B200: 80 of 2250 TFLOP/s (NVIDIA's datasheet); without TF32",
        backends=("cuda",),
        capability=(10.0, 11.9),
    ),
    Constant(
        name="fp32_matmul_share",
        value=0.19,
        unit="share of the 16-bit rate",
        source="in torch: A40 23.7 of 122, RTX PRO 6000 79 of 417 TFLOP/s (zzc0721/torch-performance-test-data "
        "issues 185 and 161); GeForce cards, whose 16-bit rate is half, reach 0.33 (RTX 5070: issue 102)",
        backends=("cuda",),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1 / 8,
        unit="share of the 16-bit rate",
        source="MI300X: 163.4 of 1307 TFLOP/s (AMD's data sheet)",
        backends=("rocm",),
        architectures=("gfx942",),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1 / 2,
        unit="share of the 16-bit rate",
        source="assumed: as of AMD's gaming cards",
        backends=("rocm",),
    ),
    Constant(
        name="fp32_matmul_share",
        value=1.0,
        unit="share of the 16-bit rate",
        source="assumed: units of one width",
    ),
    Constant(
        name="copy_efficiency",
        value=0.81,
        unit="share of the catalog's rate",
        source="of an MI300X: Ambati et al. 2025 (AMD MI300X GPU Performance Analysis)",
        backends=("rocm",),
        architectures=("gfx942",),
    ),
    Constant(
        name="copy_efficiency",
        value=0.8,
        unit="share of the catalog's rate",
        source="assumed: copies reach about 80 % of the memory's rate (STREAM and its GPU ports)",
    ),
    Constant(
        name="bandwidth_efficiency",
        value=0.8,
        unit="share of the catalog's rate",
        source="assumed: a CPU's other kernels are as fast as copies",
        backends=("cpu",),
    ),
    Constant(
        name="bandwidth_efficiency",
        value=0.6,
        unit="share of the catalog's rate",
        source=f"{_FITTED}: of all kernels that are not matmuls, the gaps between them included",
    ),
    Constant(
        name="cache_bytes",
        value=24 * MIB,
        unit="bytes",
        source="of cards for which the catalog has none: L2 of an RTX 4060 and an A30, the smallest of Ampere's data-"
        "centre cards, Ada and Blackwell (NVIDIA's architecture whitepapers)",
        backends=("cuda",),
        capability=(8.9, 99.0),
    ),
    Constant(
        name="cache_bytes",
        value=0,
        unit="bytes",
        source="assumed: smaller than what a layer's kernels read and write (6 MB on an RTX 3090, 4 on a T4)",
    ),
    Constant(
        name="cache_speedup",
        value=2.0,
        unit="ratio",
        source=f"of L2's rate to the memory's: {_FITTED_ADAPTERS}",
    ),
    Constant(
        name="link_efficiency",
        value=0.8,
        unit="share of the catalog's rate",
        source="NVLink: 361 of 450 GB/s (8 H200, all-gather) and 235 of 300 (8 A100, all-reduce) in nccl-tests "
        "(stas00/ml-engineering, network/README.md); of PCIe assumed",
    ),
    Constant(
        name="mesh_efficiency",
        value=0.7,
        unit="share of the catalog's rate",
        source="313 of 448 GB/s: 8 MI300X, all-reduce (stas00/ml-engineering, network/README.md)",
    ),
    Constant(
        name="pcie_ring_efficiency",
        value=0.5,
        unit="share of the catalog's rate",
        source="28 and 35 of 63 GB/s: 8 and 4 RTX 5090 (NVIDIA/nccl issue 1639); 40 of 63: 8 RTX PRO 6000 "
        "(voipmonitor/rtx6kpro, hardware/pcie-bandwidth.md)",
    ),
    Constant(
        name="adapter_efficiency",
        value=0.9,
        unit="share of the catalog's rate",
        source="of all-reduce between boxes: 382 of 400 GB/s (4 × 8 B200: stas00/ml-engineering, network/README.md), "
        "96 of 100 (3 × 8 A100: NVIDIA/nccl-tests issue 119), 340 of 400 (32 × 8 H100: NVIDIA/nccl issue 1218)",
    ),
    Constant(
        name="hop_seconds",
        value=3.4e-6,
        unit="seconds",
        source="NCCL's own model of a ring's hop over NVLink (NVIDIA/nccl, src/graph/tuning.cc)",
    ),
    Constant(
        name="box_hop_seconds",
        value=14e-6,
        unit="seconds",
        source="NCCL's own model of a ring's hop over a network (NVIDIA/nccl, src/graph/tuning.cc)",
    ),
    Constant(
        name="launch_seconds",
        value=0.0,
        unit="seconds",
        source="a CPU runs its kernels itself",
        backends=("cpu",),
    ),
    Constant(
        name="launch_seconds",
        value=5e-6,
        unit="seconds",
        source="from one kernel to the next: NVIDIA's usual figure for an asynchronous launch",
    ),
    Constant(
        name="host_launch_seconds",
        value=0.0,
        unit="seconds",
        source="a CPU runs its kernels itself",
        backends=("cpu",),
    ),
    # A100s came with hosts of 2019 (Google's a2: Cascade Lake at 2.2 GHz), L40S with hosts of 2021 (AWS's g6e: Milan).
    # That Python and torch are as much slower there for plain as for 4-bit layers says that it is the host. Modules of
    # adapters need no time of their own: with and without, an operator of a small Llama takes 15 and 16 µs on a CPU.
    Constant(
        name="host_launch_seconds",
        value=44e-6,
        unit="seconds",
        source="of Python and torch for an operator: fitted to two of four published runs of OpenLLaMA-7B on an A100, "
        "LoRA and QLoRA of 2 × 256 tokens (benchmarks/speed_published.py)",
        backends=("cuda",),
        capability=(8.0, 8.0),
    ),
    Constant(
        name="host_launch_seconds",
        value=28e-6,
        unit="seconds",
        source=f"of Python and torch for an operator, beside the device's: {_FITTED_ADAPTERS}, where 20 to 28 are as "
        "near",
    ),
    Constant(
        name="sharded_launch_ratio",
        value=3.8,
        unit="ratio",
        source=f"{_FITTED}: FSDP on two GPUs, whose hooks and waits slow the host down",
    ),
    Constant(
        name="exposed_traffic",
        value=0.1,
        unit="share",
        source="assumed: of traffic that runs beside computation and is still waited for",
    ),
    Constant(
        name="flops_per_byte",
        value=20.0,
        unit="FLOP/byte",
        source="a desktop CPU's 1 TFLOP/s over 50 GB/s, where the catalog knows no rate",
    ),
    Constant(
        name="unknown_bandwidth",
        value=51.2 * GB,
        unit="bytes/s",
        source="the reference machine's (JEDEC DDR4-3200, two channels), where the catalog knows none",
    ),
    Constant(
        name="unknown_host_link",
        value=15.75 * GB,
        unit="bytes/s",
        source="PCIe 3.0 x16 (PCI-SIG base specification), where the catalog knows none",
    ),
    Constant(
        name="step_time_ratio",
        value=1.0,
        unit="measured ÷ predicted",
        source="assumed: a step takes as long as its kernels one after another",
    ),
)


def assumed(name: str, device: Hardware) -> Constant:
    """The table's row for a device.

    Raises:
        KeyError: there is none.
    """
    for row in TABLE:
        if row.name == name and row.applies_to(device):
            return row
    raise KeyError(name)
