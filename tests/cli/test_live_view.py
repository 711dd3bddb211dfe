"""hf-memopt monitor. The host is real; NVIDIA, AMD and Apple are stood in for by what their drivers say."""

import json
import os
import plistlib
import pty
import signal
import subprocess
import sys
import threading
import types
from types import SimpleNamespace

import psutil
import pytest
from conftest import BIN, run
from runs import RECOVERED, reading, write_run

from hf_memopt.monitor import device_usage


def _no(*_):
    return []


@pytest.fixture
def only(monkeypatch):
    """read_devices() with one vendor and the host."""

    def choose(kept):
        for name in ("_nvidia", "_amd", "_apple"):
            if name != kept:
                monkeypatch.setattr(device_usage, name, _no)

    return choose


def test_the_host(only):
    only(None)
    (host,) = device_usage.read_devices()
    assert host.kind == "cpu" and 0 < host.used < host.total <= psutil.virtual_memory().total
    assert 0 <= host.busy <= 1 and all(one.memory > 2**28 for one in host.processes)


def test_nvidia(only, monkeypatch):
    """NVML's answers, by a stand-in with the names of nvidia-ml-py."""
    import pynvml as real

    memory = types.SimpleNamespace(used=8 * 2**30, total=24 * 2**30)
    mine = types.SimpleNamespace(pid=psutil.Process().pid, usedGpuMemory=7 * 2**30)
    gone = types.SimpleNamespace(pid=2**22 + 1, usedGpuMemory=None)
    answers = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
        "nvmlDeviceGetName": lambda handle: f"NVIDIA GeForce RTX 4090 #{handle}",
        "nvmlDeviceGetUtilizationRates": lambda handle: types.SimpleNamespace(gpu=87),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [gone, mine],
    }
    assert all(hasattr(real, name) for name in answers)
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(NVMLError=real.NVMLError, **answers))
    only("_nvidia")
    first, second, _ = device_usage.read_devices()
    assert (first.kind, first.used, first.busy, second.label) == (
        "nvidia",
        8 * 2**30,
        0.87,
        "NVIDIA GeForce RTX 4090 #1",
    )
    assert [one.memory for one in first.processes] == [7 * 2**30, None] and first.processes[1].name == "?"


def test_amd_by_its_library(only, monkeypatch):
    """amdsmi's answers, by a stand-in with the names and units of amdsmi 7."""
    monkeypatch.setitem(
        sys.modules,
        "amdsmi",
        types.SimpleNamespace(
            AmdSmiException=RuntimeError,
            amdsmi_init=lambda: None,
            amdsmi_shut_down=lambda: None,
            amdsmi_get_processor_handles=lambda: ["one"],
            amdsmi_get_gpu_vram_usage=lambda handle: {"vram_total": 24560, "vram_used": 1024},
            amdsmi_get_gpu_activity=lambda handle: {"gfx_activity": "N/A"},
            amdsmi_get_gpu_process_list=lambda handle: [
                {"pid": 5, "name": "python", "memory_usage": {"vram_mem": 2**29}}
            ],
            amdsmi_get_gpu_asic_info=lambda handle: {"market_name": "Radeon RX 7900 XTX"},
        ),
    )
    only("_amd")
    card, _ = device_usage.read_devices()
    assert (card.kind, card.used, card.total, card.busy) == ("amd", 2**30, 24560 * 2**20, None)
    assert card.processes == (device_usage.Process(5, "python", 2**29),)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (
            '{"card0": {"GPU use (%)": "41", "VRAM Total Memory (B)": "25753026560", '
            '"VRAM Total Used Memory (B)": "1048576", "Card Series": "Radeon RX 7900 XTX"}, "system": {}}',
            1,
        ),
        ("", 0),
        ("WARNING: no GPU", 0),
    ],
)
def test_amd_by_its_command(said, count, only, monkeypatch):
    """rocm-smi's JSON, where the library is missing."""
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    monkeypatch.setattr(device_usage, "command_output", lambda *command: said)
    only("_amd")
    *cards, _ = device_usage.read_devices()
    assert [(card.label, card.total, card.used, card.busy) for card in cards] == [
        ("Radeon RX 7900 XTX", 25753026560, 1048576, 0.41)
    ][:count]


def test_apple(only, monkeypatch):
    """ioreg's property list."""
    shown = [{"PerformanceStatistics": {"Device Utilization %": 12, "In use system memory": 2**31}}]
    answers = {
        "ioreg": plistlib.dumps(shown).decode(),
        "machdep.cpu.brand_string": "Apple M2",
        "iogpu.wired_limit_mb": "0",
    }
    monkeypatch.setattr(
        device_usage, "command_output", lambda *command: answers.get(command[-1], answers.get(command[0], ""))
    )
    monkeypatch.setattr(device_usage.platform, "system", lambda: "Darwin")
    monkeypatch.setattr(device_usage.platform, "machine", lambda: "arm64")
    only("_apple")
    gpu, _ = device_usage.read_devices()
    assert (gpu.label, gpu.used, gpu.busy) == ("Apple M2 GPU", 2**31, 0.12)
    assert gpu.total == psutil.virtual_memory().total


def test_the_command_line(tmp_path, command, monkeypatch):
    folder = write_run(tmp_path / "out" / "mine", readings=[reading(10), reading(20), RECOVERED])
    code, output, _ = command("monitor", folder, "--once", "--json")
    shown = json.loads(output)
    assert code == 0 and shown["devices"][-1]["status"] in ("normal", "warning", "critical", "emergency")
    assert shown["run"]["last"]["step"] == 20 and shown["run"]["events"] == [RECOVERED]
    monkeypatch.chdir(tmp_path)  # a run that is going on below out/ is found
    code, output, _ = command("monitor", "--once")
    assert code == 0 and "out/mine" in output and "step 4: out of memory" in " ".join(output.split())
    for wrong in ((tmp_path / "none",), ("--profile", "bold"), ("--interval", 0)):
        code, output, errors = command("monitor", *wrong)
        assert (code, output) == (2, "") and len(errors.splitlines()) == 1


def test_a_pipe_gets_it_once_and_without_colour(tmp_path):
    done = run("hf-memopt", "monitor", cwd=tmp_path, timeout=60)
    assert done.returncode == 0 and "(host)" in done.stdout.replace("\n", "") and "\x1b" not in done.stdout


@pytest.mark.slow
def test_the_live_view_ends_with_an_interrupt(tmp_path):
    """In a real terminal (a pseudo-terminal): waits for a run, shows it, until SIGINT."""
    main, side = pty.openpty()
    process = subprocess.Popen(
        [BIN / "hf-memopt", "monitor", "out/later", "--interval", "0.2"],
        stdout=side,
        stderr=side,
        cwd=tmp_path,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has it ignored
    )
    seen, shown, run = [], threading.Event(), tmp_path / "out" / "later"

    def read():
        """A terminal that nobody reads from fills up, and what writes to it waits."""
        while b"tables" not in (part := os.read(main, 4096)):
            seen.append(part)
            said = b"".join(seen)
            if b"waiting for out/later" in said and not run.exists():
                write_run(run, readings=[reading(30)])
            if b"tokens/s" in said:
                shown.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert shown.wait(60)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    os.write(side, b"tables")  # nothing more comes
    reader.join(10)
    os.close(side)
    os.close(main)


def test_processes_of_the_host_above_256_mib(monkeypatch):
    sizes = {1: 2**28, 2: 2**28 + 1, 3: 2**30, 4: None}
    found = [
        SimpleNamespace(info={"pid": pid, "name": None, "memory_info": size and SimpleNamespace(rss=size)})
        for pid, size in sizes.items()
    ]
    monkeypatch.setattr(device_usage.psutil, "process_iter", lambda names: found)
    assert [(one.pid, one.name, one.memory) for one in device_usage._host().processes] == [
        (3, "", 2**30),
        (2, "", 2**28 + 1),
    ]
