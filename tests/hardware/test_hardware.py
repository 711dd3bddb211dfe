"""The catalog, detection with stand-ins for cards that are not here, attention and the allocator."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hf_memopt.errors import InputError
from hf_memopt.hardware import (
    allocator,
    attention_kernels,
    configure_allocator,
    device_names,
    get_hardware,
    list_hardware,
)
from hf_memopt.hardware import detect as public_detect
from hf_memopt.hardware.attention_kernels import resolve_attention
from hf_memopt.hardware.catalog import catalog
from hf_memopt.hardware.detection import command_output
from hf_memopt.units import GIB

detect = sys.modules["hf_memopt.hardware.detection"]

# What publishes a figure: a page's address, or a document by its name.
DOCUMENT = re.compile(
    r"https?://|data ?sheet|white ?paper|specifications?\b|product page|announcement|Programming Guide|"
    r"instruction set reference|public out-of-memory messages|"
    r"as llama\.cpp prints it|^JEDEC|rocm-smi|^transformers, is_torch_bf16|"
    r"^a reference machine|^PyTorch \d|Metal Shading Language"
)
# Why a figure is not known, or its feature not there.
WHY_NONE = re.compile(r"^none: |publishes no rate|none is assumed|not assumed|^no |compute capability below")


def test_every_figure_has_a_source(subtests):
    for name in list_hardware():
        with subtests.test(name=name):
            device = get_hardware(name)
            figures = (
                *("nominal_memory", "memory", "bandwidth", "bf16_flops", "fp16_flops", "native_bf16", "fp8"),
                *("host_link", "peer_link"),
            )
            assert set(device.sources) == set(figures)
            for figure, source in device.sources.items():
                unknown = getattr(device, figure) in (None, False)
                assert DOCUMENT.search(source) or (unknown and WHY_NONE.search(source)), f"{figure}: {source}"
            least = 0.45 if device.unified_memory else 0.6  # the system and the process have their share
            assert least * device.nominal_memory <= device.memory <= device.nominal_memory
            assert device.unified_memory or device.backend not in ("mps", "cpu")
            assert device.discrete_memory != device.unified_memory
            assert (device.bf16_flops is None) or device.native_bf16


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


# Names as torch.cuda.get_device_name() reports them, with the memory that it reports.
REPORTED = [
    ("NVIDIA GeForce GTX 1080 Ti", 10.9, "6.1", "gtx_1080_ti"),
    ("NVIDIA GeForce GTX 1650 SUPER", 3.8, "7.5", "gtx_1650_super"),
    *(("NVIDIA GeForce RTX 2060", 5.8, "7.5", "rtx_2060"), ("NVIDIA GeForce RTX 2060", 11.8, "7.5", "rtx_2060_12gb")),
    *(("GeForce RTX 2080 Ti", 10.76, "7.5", "rtx_2080_ti"), ("NVIDIA GeForce RTX 3060", 11.76, "8.6", "rtx_3060")),
    ("NVIDIA GeForce RTX 3060", 7.8, "8.6", "rtx_3060_8gb"),
    ("NVIDIA GeForce RTX 3060 Ti", 7.8, "8.6", "rtx_3060_ti"),
    ("NVIDIA GeForce RTX 3060 Laptop GPU", 5.8, "8.6", "rtx_3060_laptop"),
    ("NVIDIA GeForce RTX 3080", 11.76, "8.6", "rtx_3080_12gb"),
    ("NVIDIA GeForce RTX 3080 Laptop GPU", 15.7, "8.6", "rtx_3080_16gb_laptop"),
    ("NVIDIA GeForce RTX 3090 Ti", 23.68, "8.6", "rtx_3090_ti"),
    ("NVIDIA GeForce RTX 4060 Ti", 15.6, "8.9", "rtx_4060_ti_16gb"),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", 15.7, "8.9", "rtx_4070_ti_super"),
    ("NVIDIA GeForce RTX 4090 D", 23.6, "8.9", "rtx_4090_d"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.6, "8.9", "rtx_4090_laptop"),
    ("NVIDIA GeForce RTX 5060 Ti", 15.5, "12.0", "rtx_5060_ti_16gb"),
    *(("NVIDIA GeForce RTX 5090", 31.36, "12.0", "rtx_5090"), ("NVIDIA TITAN RTX", 23.6, "7.5", "titan_rtx")),
    *(("Quadro RTX 8000", 47.4, "7.5", "quadro_rtx_8000"), ("NVIDIA RTX A6000", 47.5, "8.6", "rtx_a6000")),
    ("NVIDIA RTX 6000 Ada Generation", 47.4, "8.9", "rtx_6000_ada"),
    ("NVIDIA RTX 4000 SFF Ada Generation", 19.6, "8.9", "rtx_4000_sff_ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.9, "12.0", "rtx_pro_6000_workstation"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 94.9, "12.0", "rtx_pro_6000_server"),
    *(("NVIDIA RTX PRO 4500 Blackwell", 31.4, "12.0", "rtx_pro_4500"), ("Tesla T4", 14.56, "7.5", "t4")),
    *(("Tesla P40", 22.38, "6.1", "p40_24gb"), ("NVIDIA TITAN Xp", 11.9, "6.1", "titan_xp")),
    ("Tesla P100-PCIE-16GB", 15.9, "6.0", "p100_pcie_16gb"),
    *(("Tesla V100-SXM2-16GB", 15.77, "7.0", "v100_sxm2_16gb"), ("Tesla V100-SXM2-32GB", 31.73, "7.0", "v100_32gb")),
    *(("Tesla V100-PCIE-32GB", 31.73, "7.0", "v100_pcie_32gb"), ("NVIDIA A10", 22.06, "8.6", "a10")),
    *(("NVIDIA A10G", 22.06, "8.6", "a10g"), ("NVIDIA A30", 23.6, "8.0", "a30"), ("NVIDIA A40", 44.4, "8.6", "a40")),
    *(("NVIDIA L4", 22.03, "8.9", "l4"), ("NVIDIA L40", 44.4, "8.9", "l40"), ("NVIDIA L40S", 44.4, "8.9", "l40s")),
    *(("NVIDIA A100-SXM4-40GB", 39.39, "8.0", "a100_40gb"), ("NVIDIA A100-PCIE-40GB", 39.39, "8.0", "a100_pcie_40gb")),
    *(("NVIDIA A100-SXM4-80GB", 79.15, "8.0", "a100_80gb"), ("NVIDIA A100 80GB PCIe", 79.15, "8.0", "a100_pcie_80gb")),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 39.25, "8.0", "generic_cuda_39gb"),
    *(("NVIDIA H100 80GB HBM3", 79.1, "9.0", "h100_80gb"), ("NVIDIA H100 PCIe", 79.1, "9.0", "h100_pcie_80gb")),
    *(("NVIDIA H100 NVL", 93.1, "9.0", "h100_nvl_94gb"), ("NVIDIA H20", 95.1, "9.0", "h20_96gb")),
    *(("NVIDIA H200", 139.8, "9.0", "h200"), ("NVIDIA H200 NVL", 139.8, "9.0", "h200_nvl_141gb")),
    *(("NVIDIA GH200 480GB", 94.5, "9.0", "gh200_96gb"), ("NVIDIA B200", 178.35, "10.0", "b200")),
    *(("NVIDIA GB200", 184.0, "10.0", "gb200_186gb"), ("NVIDIA B300 SXM6 AC", 268.0, "10.3", "b300_sxm_288gb")),
    *(("NVIDIA GB10", 119.7, "12.1", "dgx_spark"), ("NVIDIA Thor", 122.8, "11.0", "jetson_agx_thor")),
    ("Orin", 61.4, "8.7", "jetson_agx_orin_64gb"),
]


def test_detection_of_cards(subtests):
    for name, gib, capability, expected in REPORTED:
        with subtests.test(name=name, gib=gib, capability=capability, expected=expected):
            major, minor = map(int, capability.split("."))
            card = _card(name, gib, major, minor)
            found = detect._cuda(card, hip=None)
            assert found.name == expected
            others = catalog()[expected].memory if found.unified_memory else card.total_memory
            assert (found.memory, found.architecture) == (min(card.total_memory, others), capability)
            assert found.native_bf16 == (major >= 8)


def test_unified_memory_is_shared_with_the_system_and_the_process():
    """Of a Jetson Orin Nano's 7.44 GiB, an idle desktop and the process leave 3.94."""
    small, spark, halo = (catalog()[name] for name in ("jetson_orin_nano_8gb", "dgx_spark", "radeon_8060s_128gb"))
    assert [round(device.memory / GIB, 2) for device in (small, spark, halo)] == [3.94, 115.54, 64.0]
    assert detect._cuda(_card("Radeon 8060S", 120, gcnArchName="gfx1151"), hip="7.0").memory == 120 * GIB


def test_detection_of_amd_cards(subtests):
    for name, gib, target, expected in [
        ("AMD Radeon RX 6800 XT", 16, "gfx1030", "rx_6800_xt"),
        ("AMD Radeon RX 7900 XT", 20, "gfx1100", "rx_7900_xt"),
        ("AMD Radeon RX 9070 XT", 15.9, "gfx1201", "rx_9070_xt"),
        ("AMD Instinct MI210", 64, "gfx90a:sramecc+", "mi210"),
        ("AMD Instinct MI250X/MI250", 64, "gfx90a", "mi250x"),
        ("AMD Instinct MI300X VF", 191.5, "gfx942", "mi300x"),
        ("AMD Instinct MI325X", 255.98, "gfx942", "mi325x"),
        ("AMD Radeon Graphics", 12, "gfx1103", "generic_rocm_12gb"),
    ]:
        with subtests.test(f"{name} {gib} {target} {expected}"):
            found = detect._cuda(_card(name, gib, gcnArchName=target), hip="6.4")
            assert found.name == expected and found.architecture == target.split(":")[0]


def test_names_as_people_write_them(subtests):
    for written, expected in [
        *(("RTX 4090", "rtx_4090"), ("4090", "rtx_4090"), ("rtx4070Ti super", "rtx_4070_ti_super")),
        *(("NVIDIA GeForce RTX 3060", "rtx_3060"), ("3080 Ti laptop", "rtx_3080_ti_laptop")),
        *(("A100-80GB-PCIe", "a100_pcie_80gb"), ("a100 80 GB", "a100_80gb"), ("h100", "h100_80gb")),
        *(("RTX PRO 5000 Blackwell", "rtx_pro_5000"), ("7900xtx", "rx_7900_xtx"), ("MI300X", "mi300x")),
        *(("M4 Max 128GB", "apple_m4_max_128gb"), ("DGX Spark", "dgx_spark"), ("GB10", "dgx_spark")),
    ]:
        with subtests.test(written=written, expected=expected):
            assert get_hardware(written).name == expected


@pytest.mark.parametrize(
    ("written", "smallest", "others"),
    [
        *(("a100", "a100_40gb", "a100_80gb"), ("4060 Ti", "rtx_4060_ti_8gb", "rtx_4060_ti_16gb")),
        *(("M4 Max", "apple_m4_max_36gb", "apple_m4_max_48gb"), ("colab", "t4", None)),
        ("Mac", "apple_m1_8gb", "and 5 more"),
    ],
)
def test_of_several_devices_a_name_is_the_smallest_and_a_line_says_so_once(written, smallest, others, caplog):
    device_names._warn_once.cache_clear()
    assert get_hardware(written).name == get_hardware(written).name == smallest
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (others is not None) and all(others in line for line in lines)


def test_a_described_device(tmp_path):
    text = '{"name": "my card", "memory": "24 GiB", "bandwidth": "1008 GB/s", "bf16_flops": 165e12}'
    device = get_hardware(text)
    assert (device.name, device.memory, device.bandwidth, device.bf16_flops) == ("my card", 24 * GIB, 1008e9, 165e12)
    assert device.backend == "cuda" and device.native_bf16 and device.discrete_memory
    file = tmp_path / "card.toml"
    file.write_text('name = "box"\nmemory = "96 GiB"\nbackend = "rocm"\nunified_memory = true\n')
    assert not get_hardware(str(file)).discrete_memory
    with pytest.raises(InputError, match="no such file"):
        get_hardware("missing.toml")


def test_an_integrated_chip_has_the_systems_memory():
    integrated = detect._cuda(_card("Some Chip", 119, 12, 1, is_integrated=1), hip=None)
    assert integrated.unified_memory and integrated.native_bf16 and not integrated.discrete_memory
    assert integrated.label == "Some Chip"


def test_what_cards_that_the_catalog_lacks_compute_in(subtests):
    """bf16 and fp8 by compute capability or gfx target; both kinds of device are told apart by torch.version.hip."""
    for architecture, native, fp8 in [
        *(
            *(("7.5", False, False), ("8.0", True, False), ("8.8", True, False), ("8.9", True, True)),
            ("10.0", True, True),
        ),
        *(("gfx1030", False, False), ("gfx906", False, False), ("gfx90a:sramecc+", True, False)),
        *(("gfx940", True, True), ("gfx950", True, True), ("gfx1103", True, False), ("gfx1201", True, True)),
    ]:
        with subtests.test(architecture):
            amd = architecture.startswith("gfx")
            numbers = (0, 0) if amd else map(int, architecture.split("."))
            found = detect._cuda(_card("A card", 20, *numbers, gcnArchName=architecture), hip="6.4" if amd else None)
            assert (found.native_bf16, found.fp8, found.architecture) == (native, fp8, architecture.split(":")[0])
            assert (found.backend, found.vendor) == (("rocm", "amd") if amd else ("cuda", "nvidia"))
            assert (found.name, found.bandwidth) == (f"generic_{found.backend}_20gb", None)
            assert not (found.unified_memory or found.bf16_flops or found.host_link or found.peer_link)
    for clock, width, bandwidth in [(7_000_000, 256, 448e9), (7_000_000, 0, None), (0, 256, None)]:
        found = detect._cuda(_card("A card", 20, memory_clock_rate=clock, memory_bus_width=width), hip=None)
        assert found.bandwidth == bandwidth and found.memory == found.nominal_memory == 20 * GIB
    for one in ({"memory_clock_rate": 7_000_000}, {"memory_bus_width": 256}):
        assert detect._cuda(_card("A card", 20, **one), hip=None).bandwidth is None


def test_intels_cards():
    known = detect._xpu(SimpleNamespace(name="Intel(R) Arc(TM) B580 Graphics", total_memory=round(11.6 * GIB)))
    assert (known.name, known.memory) == ("arc_b580", round(11.6 * GIB))
    for more, native, unified in [
        ({}, False, False),
        ({"has_bfloat16_conversions": True, "local_mem_size": 1}, True, False),
        ({"has_bfloat16_conversions": False, "local_mem_size": 0}, False, True),
    ]:
        found = detect._xpu(SimpleNamespace(name="Some Intel", total_memory=30 * GIB, architecture=7, **more))
        assert (found.native_bf16, found.unified_memory, found.fp8) == (native, unified, False)
        assert (found.vendor, found.backend, found.architecture) == ("intel", "xpu", "7")


def test_memory_that_a_driver_reports_of_a_nominal_size():
    for total, same in [(87, False), (88, True), (100, True), (102, True), (103, False)]:
        assert detect._same_memory(total, 100) is same


def test_the_host_is_this_machine_or_its_container(monkeypatch, tmp_path):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=64 * GIB))
    files = [tmp_path / "max", tmp_path / "limit"]
    monkeypatch.setattr(detect, "_CGROUP_LIMITS", tuple(map(str, files)))
    for texts, limit in [
        *(((None, None), 64), (("max", None), 64), ((f"{8 * GIB}\n", "max"), 8), ((None, "1" * 19), 64)),
    ]:
        for file, text in zip(files, texts, strict=True):
            file.unlink(missing_ok=True)
            if text:
                file.write_text(text)
        assert detect.host_memory() == limit * GIB
    assert detect.counterpart(get_hardware("cpu")).name == "cpu" and detect.counterpart(get_hardware("t4")) is None
    monkeypatch.setattr(detect.os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert detect.usable_processors() == 3
    monkeypatch.delattr(detect.os, "sched_getaffinity")
    for processors, usable in ((6, 6), (None, 1)):
        monkeypatch.setattr(detect.os, "cpu_count", lambda processors=processors: processors)
        assert detect.usable_processors() == usable


def test_apple_chips(monkeypatch):
    monkeypatch.setattr(detect, "command_output", lambda *command: "Apple M2")
    for total, working_set in ((16, 11), (8, 5)):
        monkeypatch.setattr("psutil.virtual_memory", lambda total=total: SimpleNamespace(total=total * GIB))
        assert detect._apple(working_set * GIB).name == f"apple_m2_{total}gb"
    monkeypatch.setattr(detect, "command_output", lambda *command: "Apple M3 Pro")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=36 * GIB))
    found = detect._apple(27 * GIB)
    assert found.unified_memory and found.native_bf16 and found.memory == 27 * GIB
    for chip, native in (("Apple M1 Ultra", False), ("Apple M2 Pro", False), ("Apple M12", True), ("", True)):
        monkeypatch.setattr(detect, "command_output", lambda *command, chip=chip: chip)
        found = detect._apple(25 * GIB)
        assert (found.native_bf16, found.fp8, found.backend) == (native, False, "mps")
        assert found.label == f"{chip or 'Apple Silicon'} 36 GB" and found.name == "generic_mps_25gb"


def test_attention_falls_back_to_sdpa_with_a_reason(caplog):
    attention_kernels._announce.cache_clear()
    assert resolve_attention(get_hardware("rtx_4090")) == "sdpa"
    assert "flash-attn is not installed" in caplog.text


def test_broken_flash_attention_is_named(monkeypatch):
    def broken(name):
        raise ImportError("undefined symbol: _ZN3c104cuda9SetDeviceEi")

    attention_kernels._import_error.cache_clear()
    monkeypatch.setattr(attention_kernels.importlib, "import_module", broken)
    with pytest.raises(InputError, match=r"installed but broken .*undefined symbol.*use attn_implementation='sdpa'"):
        resolve_attention(get_hardware("rtx_4090"), "flash_attention_2")
    attention_kernels._import_error.cache_clear()


def test_flash_attention_where_it_works(monkeypatch):
    """A module stands in for the compiled extension, and torch reports a card."""
    attention_kernels._import_error.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", ModuleType("flash_attn_interface"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert resolve_attention(get_hardware("h100_80gb")) == "flash_attention_3"
    assert resolve_attention(get_hardware("a100_80gb")) == "flash_attention_2"
    assert resolve_attention(get_hardware("t4")) == "sdpa"
    assert resolve_attention(get_hardware("mi300x")) == "sdpa"
    attention_kernels._import_error.cache_clear()


@pytest.fixture
def no_allocator_setting(monkeypatch):
    for name in allocator.SPELLINGS:
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


def test_the_output_of_a_command_that_fails_is_none():
    assert command_output("sh", "-c", "echo ' as it is '") == "as it is"
    assert command_output("sh", "-c", "echo half; exit 3") == command_output("there-is-no-such-command") == ""
