"""The catalog: what each known device offers, every figure with its public source.

Units: bytes, bytes/s (one direction of a link) and FLOP/s. Rates are dense (no 2:4 sparsity), with fp32 accumulation.
`memory` is what PyTorch reports as the device's total, which is what a job can use; `nominal_memory` is what is
printed on the box. GiB is 2**30 bytes.
"""

from dataclasses import dataclass, field
from types import MappingProxyType

from hf_memopt.errors import choose
from hf_memopt.units import GIB

DEVICES_PER_HOST = 8  # at most, in the machines that clusters are made of (NVIDIA HGX and DGX, AMD's platforms)
GB = 10**9
TERA = 10**12

# PCI-SIG base specifications: transfer rate per lane x 128b/130b coding x 16 lanes, one direction.
PCIE3_X16 = 15.75 * GB
PCIE4_X16 = 31.5 * GB
PCIE5_X16 = 63.0 * GB


@dataclass(frozen=True)
class Hardware:
    """One device.

    Attributes:
        name: key in the catalog, or `generic_…` for a device that is not in it.
        label: the product's name.
        vendor: nvidia | amd | apple | intel | cpu.
        backend: cuda | rocm | mps | xpu | cpu, the PyTorch build it needs.
        nominal_memory, memory: bytes (see the module's docstring).
        bandwidth: memory bandwidth, bytes/s.
        bf16_flops, fp16_flops: dense FLOP/s; bf16 is None where the device only emulates it.
        native_bf16: computes in bfloat16 itself. PyTorch's `is_bf16_supported()` also says yes to emulation.
        fp8: has fp8 matrix units.
        host_link, peer_link: bytes/s in one direction to the host and to another device of its kind.
        architecture: CUDA compute capability ("9.0"), AMD gfx target or marketing generation.
        unified_memory: shares its memory with the operating system and other programs.
        sources: figure -> where it was published. A figure that was derived says how.

    A figure that is not known is None, never a guess.
    """

    name: str
    label: str
    vendor: str
    backend: str
    nominal_memory: int
    memory: int
    bandwidth: float | None
    bf16_flops: float | None
    fp16_flops: float | None
    native_bf16: bool
    fp8: bool
    host_link: float | None
    peer_link: float | None
    architecture: str = ""
    unified_memory: bool = False
    sources: MappingProxyType = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def memory_apart(self) -> bool:
        """Whether there is host memory beside the device's, for what is offloaded."""
        return self.backend not in ("cpu", "mps")

    @property
    def is_large(self) -> bool:
        """Whether it is a data center's device, above a desktop's 32 GB with room for the 40 GB of an A100."""
        return self.memory > 36 * GIB


_AMPERE = "NVIDIA Ampere GA102 GPU Architecture whitepaper V2.1, appendices"
_ADA = "NVIDIA Ada GPU Architecture whitepaper V2.1, appendices"
_BLACKWELL_RTX = "NVIDIA RTX Blackwell GPU Architecture whitepaper V1.1, appendix A"
_TOTAL = "total reported by PyTorch, as printed in its public out-of-memory messages ('total capacity of … GiB')"
_PCIE = "PCI Express base specification, x16, one direction"
_NO_PEER_LINK = "no NVLink connector: peers are reached over PCIe (product page)"
_SHADER = "2 x the published fp32 shader rate, the ratio of the whitepaper's GA102 cards"


def _device(
    name,
    label,
    vendor,
    backend,
    nominal,
    memory,
    bandwidth,
    bf16,
    fp16,
    native_bf16,
    fp8,
    host,
    peer,
    arch,
    sources,
    unified=False,
) -> Hardware:
    """A row: nominal and usable memory in GiB, bandwidth and links in bytes/s, rates in TFLOP/s."""
    return Hardware(
        name=name,
        label=label,
        vendor=vendor,
        backend=backend,
        nominal_memory=round(nominal * GIB),
        memory=round(memory * GIB),
        bandwidth=bandwidth,
        bf16_flops=None if bf16 is None else bf16 * TERA,
        fp16_flops=None if fp16 is None else fp16 * TERA,
        native_bf16=native_bf16,
        fp8=fp8,
        host_link=host,
        peer_link=peer,
        architecture=arch,
        unified_memory=unified,
        sources=MappingProxyType(sources),
    )


def _nvidia(
    name, label, nominal, memory, bandwidth, rate, arch, host, peer, document, *, rate_source=None, peer_source
):
    """An NVIDIA card: bf16 runs at fp16's rate from compute capability 8.0 on, fp8 exists from 8.9 on."""
    capability = float(arch)
    native = capability >= 8.0
    return _device(
        name,
        label,
        "nvidia",
        "cuda",
        nominal,
        memory,
        bandwidth * GB,
        rate if native else None,
        rate,
        native,
        capability >= 8.9,
        host,
        peer,
        arch,
        {
            "nominal_memory": document,
            "memory": _TOTAL,
            "bandwidth": document,
            "bf16_flops": (rate_source or document) if native else "compute capability below 8.0: emulated only",
            "fp16_flops": rate_source or document,
            "native_bf16": "CUDA C++ Programming Guide, table of arithmetic by compute capability (bf16 from 8.0)",
            "fp8": "CUDA C++ Programming Guide, table of features by compute capability (fp8 from 8.9)",
            "host_link": _PCIE,
            "peer_link": peer_source,
        },
    )


_NVLINK_BRIDGE = f"{_AMPERE}: NVLink bridge 112.5 GB/s in both directions, sold separately"


def _apple_m2(memory: int) -> Hardware:
    """An M2 with so many GB."""
    return _device(
        f"apple_m2_{memory}gb",
        f"Apple M2 {memory} GB",
        "apple",
        "mps",
        memory,
        memory * 2 / 3,
        100 * GB,
        None,
        3.6,
        False,
        False,
        None,
        None,
        "M2",
        {
            "nominal_memory": "Apple M2 announcement (June 2022)",
            "memory": f"Metal's recommendedMaxWorkingSetSize, two thirds of {memory} GiB, as llama.cpp prints it",
            "bandwidth": "Apple M2 announcement: 100 GB/s",
            "bf16_flops": "transformers, is_torch_bf16_gpu_available: emulated on M1 and M2",
            "fp16_flops": "Apple M2 announcement: 3.6 TFLOPS fp32; Apple publishes no fp16 rate",
            "native_bf16": "transformers, is_torch_bf16_gpu_available: emulated on M1 and M2",
            "fp8": "Metal Shading Language specification: no fp8 type",
            "host_link": "none: unified memory",
            "peer_link": "none: one device",
        },
        unified=True,
    )


_DEVICES = [
    _nvidia(
        "rtx_3060",
        "NVIDIA GeForce RTX 3060 12 GB",
        12,
        11.76,
        360,
        25.5,
        "8.6",
        PCIE4_X16,
        PCIE4_X16,
        "NVIDIA GeForce RTX 3060 specifications",
        rate_source=_SHADER,
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "rtx_3070",
        "NVIDIA GeForce RTX 3070",
        8,
        7.79,
        448,
        40.6,
        "8.6",
        PCIE4_X16,
        PCIE4_X16,
        _AMPERE,
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "rtx_3080",
        "NVIDIA GeForce RTX 3080 10 GB",
        10,
        9.78,
        760,
        59.5,
        "8.6",
        PCIE4_X16,
        PCIE4_X16,
        _AMPERE,
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "rtx_3090",
        "NVIDIA GeForce RTX 3090",
        24,
        23.69,
        936,
        71.0,
        "8.6",
        PCIE4_X16,
        56.25 * GB,
        _AMPERE,
        peer_source=_NVLINK_BRIDGE,
    ),
    _nvidia(
        "rtx_3090_ti",
        "NVIDIA GeForce RTX 3090 Ti",
        24,
        23.68,
        1008,
        80.0,
        "8.6",
        PCIE4_X16,
        56.25 * GB,
        "NVIDIA GeForce RTX 3090 Ti specifications",
        rate_source=_SHADER,
        peer_source=_NVLINK_BRIDGE,
    ),
    _nvidia(
        "rtx_4080",
        "NVIDIA GeForce RTX 4080",
        16,
        15.70,
        716.8,
        97.5,
        "8.9",
        PCIE4_X16,
        PCIE4_X16,
        _ADA,
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "rtx_4090",
        "NVIDIA GeForce RTX 4090",
        24,
        23.64,
        1008,
        165.2,
        "8.9",
        PCIE4_X16,
        PCIE4_X16,
        _ADA,
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "rtx_5090",
        "NVIDIA GeForce RTX 5090",
        32,
        31.36,
        1792,
        209.5,
        "12.0",
        PCIE5_X16,
        PCIE5_X16,
        _BLACKWELL_RTX,
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "t4",
        "NVIDIA T4",
        16,
        14.56,
        320,
        65.0,
        "7.5",
        PCIE3_X16,
        PCIE3_X16,
        "NVIDIA T4 Tensor Core GPU datasheet",
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "v100_32gb",
        "NVIDIA V100 SXM2 32 GB",
        32,
        31.73,
        900,
        125.0,
        "7.0",
        PCIE3_X16,
        150 * GB,
        "NVIDIA V100 Tensor Core GPU datasheet",
        peer_source="datasheet: NVLink 300 GB/s in both directions",
    ),
    _nvidia(
        "l4",
        "NVIDIA L4",
        24,
        22.03,
        300,
        121.0,
        "8.9",
        PCIE4_X16,
        PCIE4_X16,
        "NVIDIA L4 Tensor Core GPU datasheet (rates halved: it prints sparse ones)",
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "l40s",
        "NVIDIA L40S",
        48,
        44.40,
        864,
        362.05,
        "8.9",
        PCIE4_X16,
        PCIE4_X16,
        "NVIDIA L40S GPU datasheet",
        peer_source=_NO_PEER_LINK,
    ),
    _nvidia(
        "a100_40gb",
        "NVIDIA A100 SXM4 40 GB",
        40,
        39.39,
        1555,
        312.0,
        "8.0",
        PCIE4_X16,
        300 * GB,
        "NVIDIA A100 Tensor Core GPU datasheet",
        peer_source="datasheet: NVLink 600 GB/s in both directions",
    ),
    _nvidia(
        "a100_80gb",
        "NVIDIA A100 SXM4 80 GB",
        80,
        79.15,
        2039,
        312.0,
        "8.0",
        PCIE4_X16,
        300 * GB,
        "NVIDIA A100 Tensor Core GPU datasheet",
        peer_source="datasheet: NVLink 600 GB/s in both directions",
    ),
    _nvidia(
        "h100_80gb",
        "NVIDIA H100 SXM5 80 GB",
        80,
        79.10,
        3350,
        989.4,
        "9.0",
        PCIE5_X16,
        450 * GB,
        "NVIDIA H100 Tensor Core GPU datasheet (rates halved: it prints sparse ones)",
        peer_source="datasheet: NVLink 900 GB/s in both directions",
    ),
    # 141 GB and 180 GB are decimal on the vendor's sheet; 141e9 / 2**30 = 131.3 would contradict the reported total,
    # so nominal memory keeps the printed number with binary units, as for every other card here.
    _nvidia(
        "h200",
        "NVIDIA H200 SXM5",
        141,
        139.80,
        4800,
        989.4,
        "9.0",
        PCIE5_X16,
        450 * GB,
        "NVIDIA H200 Tensor Core GPU datasheet (rates halved: it prints sparse ones)",
        peer_source="datasheet: NVLink 900 GB/s in both directions",
    ),
    _nvidia(
        "b200",
        "NVIDIA B200 SXM",
        180,
        178.35,
        7700,
        2250.0,
        "10.0",
        PCIE5_X16,
        900 * GB,
        "NVIDIA HGX B200 datasheet (rates halved: it prints sparse ones)",
        peer_source="datasheet: NVLink 1.8 TB/s in both directions",
    ),
    _device(
        "rx_6750_xt",
        "AMD Radeon RX 6750 XT",
        "amd",
        "rocm",
        12,
        11.98,
        432 * GB,
        None,
        26.6,
        False,
        False,
        PCIE4_X16,
        PCIE4_X16,
        "gfx1031",
        {
            "nominal_memory": "AMD Radeon RX 6750 XT product page",
            "memory": "rocm-smi total of 12272 MiB, quoted in the project's founding notes",
            "bandwidth": "AMD Radeon RX 6750 XT product page",
            "bf16_flops": "RDNA 2 instruction set reference: no bf16 arithmetic, emulated only",
            "fp16_flops": "AMD product page: peak half precision compute (vector units, no matrix units)",
            "native_bf16": "RDNA 2 instruction set reference",
            "fp8": "RDNA 2 instruction set reference",
            "host_link": _PCIE,
            "peer_link": f"no Infinity Fabric Link: peers are reached over PCIe ({_PCIE})",
        },
    ),
    _device(
        "rx_7900_xtx",
        "AMD Radeon RX 7900 XTX",
        "amd",
        "rocm",
        24,
        23.98,
        960 * GB,
        122.8,
        122.8,
        True,
        False,
        PCIE4_X16,
        PCIE4_X16,
        "gfx1100",
        {
            "nominal_memory": "AMD Radeon RX 7900 XTX product page",
            "memory": _TOTAL,
            "bandwidth": "AMD Radeon RX 7900 XTX product page",
            "bf16_flops": "RDNA 3 instruction set reference: WMMA bf16 at fp16's rate",
            "fp16_flops": "AMD product page: peak half precision matrix compute",
            "native_bf16": "RDNA 3 instruction set reference (v_wmma_f32_16x16x16_bf16)",
            "fp8": "RDNA 3 instruction set reference: none",
            "host_link": _PCIE,
            "peer_link": f"no Infinity Fabric Link: peers are reached over PCIe ({_PCIE})",
        },
    ),
    _device(
        "mi300x",
        "AMD Instinct MI300X",
        "amd",
        "rocm",
        192,
        191.98,
        5300 * GB,
        1307.4,
        1307.4,
        True,
        True,
        PCIE5_X16,
        64 * GB,
        "gfx942",
        {
            "nominal_memory": "AMD Instinct MI300X data sheet",
            "memory": _TOTAL,
            "bandwidth": "AMD Instinct MI300X data sheet",
            "bf16_flops": "AMD Instinct MI300X data sheet",
            "fp16_flops": "AMD Instinct MI300X data sheet",
            "native_bf16": "AMD Instinct MI300X data sheet",
            "fp8": "AMD Instinct MI300X data sheet",
            "host_link": _PCIE,
            "peer_link": "AMD CDNA 3 white paper: one of 7 Infinity Fabric links, 128 GB/s in both directions",
        },
    ),
    _apple_m2(8),
    _apple_m2(16),
    _device(
        "apple_m4_max_64gb",
        "Apple M4 Max 64 GB (40-core GPU)",
        "apple",
        "mps",
        64,
        48,
        546 * GB,
        None,
        None,
        True,
        False,
        None,
        None,
        "M4 Max",
        {
            "nominal_memory": "Apple MacBook Pro (2024) technical specifications",
            "memory": "Metal's recommendedMaxWorkingSetSize, three quarters of 64 GiB, as llama.cpp prints it",
            "bandwidth": "Apple MacBook Pro (2024) technical specifications: 546 GB/s",
            "bf16_flops": "Apple publishes no rate",
            "fp16_flops": "Apple publishes no rate",
            "native_bf16": "Metal Shading Language 3.1 has bfloat; transformers names only M1 and M2 as emulated",
            "fp8": "Metal Shading Language specification: no fp8 type",
            "host_link": "none: unified memory",
            "peer_link": "none: one device",
        },
        unified=True,
    ),
    _device(
        "cpu",
        "CPU, a 16 GiB desktop as reference",
        "cpu",
        "cpu",
        16,
        16,
        51.2 * GB,
        None,
        None,
        False,
        False,
        None,
        None,
        "x86-64 or arm64",
        {
            "nominal_memory": "a reference machine; detect() puts this machine's memory here",
            "memory": "a reference machine; detect() puts this machine's memory here",
            "bandwidth": "JEDEC DDR4-3200, two channels of 25.6 GB/s",
            "bf16_flops": "differs by an order of magnitude between CPUs; none is assumed",
            "fp16_flops": "differs by an order of magnitude between CPUs; none is assumed",
            "native_bf16": "only with AVX512_BF16, AMX or Arm BF16; not assumed",
            "fp8": "PyTorch 2.13 computes fp8 products on CPUs too; that they are faster is assumed for none",
            "host_link": "none: it is the host",
            "peer_link": "none: one host",
        },
        unified=True,
    ),
]

_CATALOG = {device.name: device for device in _DEVICES}


def list_hardware() -> list[str]:
    """The names in the catalog, sorted."""
    return sorted(_CATALOG)


def catalog_entry(name: str) -> Hardware:
    """The catalog's entry for a name.

    Raises:
        InputError: the name is not in the catalog.
    """
    if name not in _CATALOG:
        raise choose("hardware", name, [*_CATALOG, "auto"])
    return _CATALOG[name]
