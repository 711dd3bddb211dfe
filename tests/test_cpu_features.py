"""DeepSpeed's questions about the CPU, without py-cpuinfo's busy loop."""

import shutil
import sys

import pytest


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("lscpu"), reason="needs DeepSpeed and lscpu")
def test_the_answer_is_py_cpuinfos(monkeypatch):
    import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from hf_memopt.training.cpu_features import answer_at_once

    slow = cpuinfo.cpuinfo._get_cpu_info_from_proc_cpuinfo()  # one of its sources, without the busy loop
    monkeypatch.setattr(cpuinfo, "get_cpu_info", cpuinfo.get_cpu_info)
    answer_at_once()
    builder = CPUAdamBuilder()
    width = builder.simd_width()
    assert builder.cpu_arch()
    flags = slow.get("flags", [])
    wanted = "-D__AVX512__" if "avx512f" in flags else "-D__AVX256__" if "avx2" in flags else width
    assert width == wanted
