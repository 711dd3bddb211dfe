"""The catalog: what each known device offers, read from catalog.toml, every figure with its public source.

Units: bytes, bytes/s (one direction of a link) and FLOP/s. Rates are dense (no 2:4 sparsity), with fp32 accumulation.
`memory` is what PyTorch reports as the device's total, which is what a job can use; `nominal_memory` is what is
printed on the box. GiB is 2**30 bytes.
"""

import functools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hf_memopt.hardware.device_names import counted, match, short_name
from hf_memopt.units import GIB, MIB

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
class Box:
    """The machine that a device is sold in, as far as links are concerned.

    Attributes:
        adapters: to the network.
        adapter: bytes/s of each, in one direction.
        switched: peer_link reaches any other device (NVSwitch).
        meshed: peer_link is shared out to one link to each other device.
        source: where it was published.
    """

    adapters: int
    adapter: float
    source: str
    switched: bool = False
    meshed: bool = False


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
        cache: bytes of the last cache before the memory, where its size matters.
        architecture: CUDA compute capability ("9.0"), AMD gfx target or marketing generation.
        unified_memory: shares its memory with the operating system and other programs.
        reported: pattern of the names that PyTorch reports, where they differ from the label.
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
    cache: float | None = None
    architecture: str = ""
    unified_memory: bool = False
    reported: str = ""
    sources: MappingProxyType = field(default_factory=lambda: MappingProxyType({}), compare=False)

    @property
    def discrete_memory(self) -> bool:
        """True if there is host memory beside the device's, for what is offloaded."""
        return self.backend not in ("cpu", "mps") and not self.unified_memory

    @property
    def capability(self) -> float:
        """CUDA compute capability; 0 for other devices, and where it is not known."""
        return float(self.architecture or 0) if self.backend == "cuda" else 0.0

    @property
    def is_large(self) -> bool:
        """True if it is a data center's device, above a desktop's 32 GB with room for the 40 GB of an A100."""
        return self.memory > 36 * GIB


def list_hardware() -> list[str]:
    """The names in the catalog, sorted."""
    return sorted(catalog())


def catalog_entry(name: str) -> Hardware:
    """The catalog's entry for a name, as it is written there or as people write it ("RTX 4090", "A100-80GB-PCIe").

    Raises:
        InputError: no such device.
    """
    devices = catalog()
    return devices[name] if name in devices else devices[match(name, devices)]


def read_devices(text: str) -> tuple[str, int]:
    """A device as people write it, and how many: ("rtx_4090", 2) of "rtx_4090x2", "2 x RTX 4090" and "4090x2".

    Raises:
        InputError: as names.counted() and names.match() raise it.
    """
    name, count = counted(text, catalog())
    return (name if name in catalog() else match(name, catalog())), count


def box_of(device: Hardware) -> Box:
    """The box of a device: one whose cards talk over PCIe where the catalog names no other."""
    return _boxes().get(device.name) or _boxes()[""]


@functools.cache
def _boxes() -> dict[str, Box]:
    """Name of a device -> its box."""
    rows = [dict(row) for row in catalog_tables()["boxes"]]
    boxes = [(row.pop("cards"), Box(**{**row, "adapter": row["adapter"] * GB})) for row in rows]
    return {name: box for names, box in boxes for name in names}


@functools.cache
def catalog_tables() -> dict[str, Any]:
    """The content of catalog.toml."""
    return tomllib.loads((Path(__file__).parent / "catalog.toml").read_text(encoding="utf-8"))


@functools.cache
def catalog() -> dict[str, Hardware]:
    """Every device of catalog.toml, by name."""
    tables = catalog_tables()
    entries = tables["devices"] | {key: row for series in tables["series"] for key, row in _rows(series)}
    return {name: _build(name, entry, tables["vendors"]) for name, entry in entries.items()}


def _rows(series: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The entries of a series, as [devices] would have them."""
    shared = {key: value for key, value in series.items() if key not in ("cards", "key", "label")}
    for card in series["cards"]:
        for size in card.get("sizes", [None]):
            name = card["name"] if size is None else f"{card['name']} {size} GB"
            entry = shared | card | {"label": series["label"].format(name), "nominal_gib": size or card["gib"]}
            if size is not None:
                entry |= {"architecture": card["name"], "memory_share": 2 / 3 if size <= 32 else 3 / 4}
            entry["memory_gib"] = entry["nominal_gib"] * entry["memory_share"] - entry.get("others_gib", 0)
            key = card.get("key") or series.get("key", "{}").format(short_name(name))
            # An entry of a series with the rates and sources that follow from the series.
            if "fp16_per_fp32" in entry and "fp32_tflops" in entry:
                entry["fp16_tflops"] = entry["fp32_tflops"] * entry["fp16_per_fp32"]
            if entry.get("vendor") in ("amd", "apple") and entry.get("native_bf16") and "fp16_tflops" in entry:
                entry.setdefault("bf16_tflops", entry["fp16_tflops"])
            linked = entry.get("vendor") != "apple" and not entry.get("unified_memory")
            if linked and entry["host_link"] is not None:
                entry.setdefault("peer_link", entry["host_link"])
            fp16 = entry.get("fp16_source", entry["document"])
            derived = {
                "memory": "derived: the nominal size times the share that PyTorch reports of the series' other cards: "
                f"{entry['document']}",
                "fp16_flops": fp16,
                "bf16_flops": entry.get("bf16_source", fp16),
                "peer_link": "PCI Express base specification, peers are reached over PCIe",
            }
            yield key, entry | {"sources": derived | entry.get("sources", {})}


def _build(name: str, entry: dict[str, Any], vendors: dict[str, dict[str, str]]) -> Hardware:
    """An entry of catalog.toml, where the keys are explained."""
    vendor = entry.get("vendor", "nvidia")
    if vendor == "nvidia":
        capability = float(entry["architecture"])
        entry = {"backend": "cuda", "native_bf16": capability >= 8.0, "fp8": capability >= 8.9, **entry}
        if entry["native_bf16"]:
            entry["bf16_tflops"] = entry.get("fp16_tflops")
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
        cache=_times(entry.get("cache"), MIB),
        architecture=entry["architecture"],
        unified_memory=entry.get("unified_memory", False),
        reported=entry.get("reported", ""),
        sources=MappingProxyType(sources),
    )


def _times(figure: float | None, unit: int) -> float | None:
    return None if figure is None else figure * unit
