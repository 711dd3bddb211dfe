"""The catalog: what each known device offers, read from catalog.toml, every figure with its public source.

Units: bytes, bytes/s (one direction of a link) and FLOP/s. Rates are dense (no 2:4 sparsity), with fp32 accumulation.
`memory` is what PyTorch reports as the device's total, which is what a job can use; `nominal_memory` is what is
printed on the box. GiB is 2**30 bytes.
"""

import functools
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_memopt.errors import choose
from hf_memopt.units import GIB

DEVICES_PER_HOST = 8  # at most, in the machines that clusters are made of (NVIDIA HGX and DGX, AMD's platforms)
GB = 10**9
TERA = 10**12
FIGURES = (
    "nominal_memory",
    "memory",
    "bandwidth",
    "bf16_flops",
    "fp16_flops",
    "native_bf16",
    "fp8",
    "host_link",
    "peer_link",
)


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


def list_hardware() -> list[str]:
    """The names in the catalog, sorted."""
    return sorted(_catalog())


def catalog_entry(name: str) -> Hardware:
    """The catalog's entry for a name.

    Raises:
        InputError: the name is not in the catalog.
    """
    if name not in _catalog():
        raise choose("hardware", name, [*_catalog(), "auto"])
    return _catalog()[name]


@functools.cache
def _catalog() -> dict[str, Hardware]:
    tables = tomllib.loads((Path(__file__).parent / "catalog.toml").read_text(encoding="utf-8"))
    return {name: _build(name, entry, tables["vendors"]) for name, entry in tables["devices"].items()}


def _build(name: str, entry: dict[str, Any], vendors: dict[str, dict[str, str]]) -> Hardware:
    """An entry of catalog.toml, where the keys are explained."""
    vendor = entry.get("vendor", "nvidia")
    if vendor == "nvidia":
        capability = float(entry["architecture"])
        entry = {"backend": "cuda", "native_bf16": capability >= 8.0, "fp8": capability >= 8.9, **entry}
        if entry["native_bf16"]:
            entry["bf16_tflops"] = entry["fp16_tflops"]
    sources = dict.fromkeys(FIGURES, entry.get("document")) | vendors.get(vendor, {}) | entry.get("sources", {})
    return Hardware(
        name=name,
        label=entry["label"],
        vendor=vendor,
        backend=entry["backend"],
        nominal_memory=round(entry["nominal_gib"] * GIB),
        memory=round(entry["memory_gib"] * GIB),
        bandwidth=_times(entry.get("bandwidth"), GB),
        bf16_flops=_times(entry.get("bf16_tflops"), TERA),
        fp16_flops=_times(entry.get("fp16_tflops"), TERA),
        native_bf16=entry.get("native_bf16", False),
        fp8=entry.get("fp8", False),
        host_link=_times(entry.get("host_link"), GB),
        peer_link=_times(entry.get("peer_link"), GB),
        architecture=entry["architecture"],
        unified_memory=entry.get("unified_memory", False),
        sources=MappingProxyType(sources),
    )


def _times(figure: float | None, unit: int) -> float | None:
    return None if figure is None else figure * unit
