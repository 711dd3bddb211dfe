"""The catalog, detection with stand-ins for cards that are not here, attention and the allocator."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_memopt.errors import InputError
from hf_memopt.hardware import allocator, attention, configure_allocator, get_hardware, list_hardware
from hf_memopt.hardware import detect as public_detect
from hf_memopt.hardware.attention import resolve_attention
from hf_memopt.units import GIB

detect = sys.modules["hf_memopt.hardware.detection"]

REQUIRED = [
    "rtx_3060",
    "rtx_3070",
    "rtx_3080",
    "rtx_3090",
    "rtx_3090_ti",
    "rtx_4080",
    "rtx_4090",
    "rtx_5090",
    "t4",
    "v100_32gb",
    "l4",
    "l40s",
    "a100_40gb",
    "a100_80gb",
    "h100_80gb",
    "h200",
    "b200",
    "rx_6750_xt",
    "rx_7900_xtx",
    "mi300x",
    "apple_m2_8gb",
    "apple_m2_16gb",
    "apple_m4_max_64gb",
    "cpu",
]


# What publishes a figure: a page's address, or a document by its name.
DOCUMENT = re.compile(
    r"https?://|data ?sheet|white ?paper|specifications?\b|product page|announcement|Programming Guide|"
    r"instruction set reference|public out-of-memory messages|"
    r"as llama\.cpp prints it|^JEDEC|rocm-smi|^transformers, is_torch_bf16|"
    r"^a reference machine|^PyTorch \d|Metal Shading Language"
)
# Why a figure is not known, or its feature not there.
WHY_NONE = re.compile(r"^none: |publishes no rate|none is assumed|not assumed|^no |compute capability below")


def test_the_required_devices_are_there():
    assert set(REQUIRED) <= set(list_hardware())


@pytest.mark.parametrize("name", list_hardware())
def test_every_figure_has_a_source(name):
    device = get_hardware(name)
    figures = (
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
    assert set(device.sources) == set(figures)
    for figure, source in device.sources.items():
        unknown = getattr(device, figure) in (None, False)
        assert DOCUMENT.search(source) or (unknown and WHY_NONE.search(source)), f"{figure}: {source}"
    assert 0.6 * device.nominal_memory <= device.memory <= device.nominal_memory
    assert device.unified_memory == (device.backend in ("mps", "cpu"))
    assert (device.bf16_flops is None) or device.native_bf16


def test_emulated_bfloat16_is_not_native():
    for name in ("t4", "v100_32gb", "rx_6750_xt", "apple_m2_16gb"):
        assert not get_hardware(name).native_bf16
    for name in ("rtx_3060", "a100_40gb", "rx_7900_xtx", "mi300x", "apple_m4_max_64gb"):
        assert get_hardware(name).native_bf16


def test_unknown_hardware_names_the_closest():
    with pytest.raises(InputError, match="Did you mean 'rtx_4090'"):
        get_hardware("rtx_4900")


def test_detect_on_this_machine():
    import psutil

    device = public_detect()
    assert device.backend == "cpu" and device.unified_memory  # CUDA_VISIBLE_DEVICES is empty in the tests
    assert device.memory <= psutil.virtual_memory().total


def _card(name, gib, major=8, minor=6, **more):
    """A stand-in for torch's properties of a card that is not in this machine."""
    return SimpleNamespace(name=name, total_memory=round(gib * GIB), major=major, minor=minor, **more)


@pytest.mark.parametrize(
    ("card", "expected"),
    [
        (_card("NVIDIA GeForce RTX 3060", 11.76), "rtx_3060"),
        (_card("NVIDIA GeForce RTX 3060", 7.8), "generic_cuda_8gb"),  # the 8 GB variant is another card
        (_card("NVIDIA GeForce RTX 3060 Ti", 7.8), "generic_cuda_8gb"),
        (_card("NVIDIA GeForce RTX 3090 Ti", 23.68), "rtx_3090_ti"),
        (_card("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, 8, 9), "generic_cuda_16gb"),
        (_card("Tesla T4", 14.56, 7, 5), "t4"),
        (_card("NVIDIA L4", 22.03, 8, 9), "l4"),
        (_card("NVIDIA L40S", 44.40, 8, 9), "l40s"),
        (_card("Tesla V100-SXM2-32GB", 31.73, 7, 0), "v100_32gb"),
        (_card("NVIDIA A100-SXM4-40GB", 39.39, 8, 0), "a100_40gb"),
        (_card("NVIDIA A100-SXM4-80GB", 79.15, 8, 0), "a100_80gb"),
        (_card("NVIDIA H100 80GB HBM3", 79.1, 9, 0), "h100_80gb"),
        (_card("NVIDIA H200", 139.8, 9, 0), "h200"),
    ],
)
def test_detection_of_cards(card, expected):
    found = detect._cuda(card, hip=None)
    assert found.name == expected
    assert found.memory == card.total_memory
    assert found.native_bf16 == (card.major >= 8)


def test_an_unknown_card_tells_only_what_it_knows():
    found = detect._cuda(_card("Some Card", 20, 7, 5, memory_clock_rate=7_000_000, memory_bus_width=256), hip=None)
    assert found.name == "generic_cuda_20gb" and found.label == "Some Card"
    assert found.bandwidth == pytest.approx(448e9)
    assert found.bf16_flops is None and not found.native_bf16 and not found.fp8
    spark = detect._cuda(_card("NVIDIA GB10", 119, 12, 1, is_integrated=1), hip=None)
    assert spark.unified_memory and spark.native_bf16


def test_rocm_is_distinguished_from_cuda():
    card = _card("AMD Radeon RX 6800", 16, gcnArchName="gfx1030")
    found = detect._cuda(card, hip="6.4")
    assert (found.backend, found.vendor, found.native_bf16) == ("rocm", "amd", False)
    assert detect._cuda(_card("AMD Instinct MI250X", 64, gcnArchName="gfx90a:sramecc+"), hip="6.4").native_bf16


def test_apple_chips(monkeypatch):
    monkeypatch.setattr(detect, "command_output", lambda *command: "Apple M2")
    for total, working_set in ((16, 11), (8, 5)):
        monkeypatch.setattr("psutil.virtual_memory", lambda total=total: SimpleNamespace(total=total * GIB))
        assert detect._apple(working_set * GIB).name == f"apple_m2_{total}gb"
    monkeypatch.setattr(detect, "command_output", lambda *command: "Apple M3 Pro")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=36 * GIB))
    found = detect._apple(27 * GIB)
    assert found.unified_memory and found.native_bf16 and found.memory == 27 * GIB


def test_attention_falls_back_to_sdpa_with_a_reason(caplog):
    attention._announce.cache_clear()
    assert resolve_attention(get_hardware("rtx_4090")) == "sdpa"
    assert "flash-attn is not installed" in caplog.text


def test_broken_flash_attention_is_named(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")

    attention._import_error.cache_clear()
    monkeypatch.setattr(attention.importlib, "import_module", broken)
    with pytest.raises(InputError, match=r"installed but broken .*undefined symbol.*use attn_implementation='sdpa'"):
        resolve_attention(get_hardware("rtx_4090"), "flash_attention_2")
    attention._import_error.cache_clear()


def test_flash_attention_where_it_works(monkeypatch):
    """A module stands in for the compiled extension, and torch is told that a card is there."""
    attention._import_error.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_attention(get_hardware("h100_80gb")) == "flash_attention_3"
    assert resolve_attention(get_hardware("a100_80gb")) == "flash_attention_2"
    assert resolve_attention(get_hardware("t4")) == "sdpa"
    assert resolve_attention(get_hardware("mi300x")) == "sdpa"
    attention._import_error.cache_clear()


@pytest.fixture
def no_allocator_setting(monkeypatch):
    for name in allocator._SPELLINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(allocator, "_build_has_cuda_allocator", lambda: True)


def test_allocator_is_set_once(no_allocator_setting, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    assert configure_allocator() == "expandable_segments:True"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_users_allocator_setting_stays(no_allocator_setting, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert configure_allocator() == "max_split_size_mb:128"


def test_allocator_too_late_is_said(no_allocator_setting, monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    assert configure_allocator() == ""
    assert "too late" in caplog.text


@pytest.mark.parametrize(
    ("version", "platform"), [("2.13.0+rocm7.1", "linux"), ("2.13.0+cpu", "linux"), ("2.13.0", "darwin")]
)
def test_allocator_is_left_alone_without_cuda(monkeypatch, version, platform):
    monkeypatch.setattr(allocator.metadata, "version", lambda name: version)
    monkeypatch.setattr(allocator.sys, "platform", platform)
    assert not allocator._build_has_cuda_allocator()
