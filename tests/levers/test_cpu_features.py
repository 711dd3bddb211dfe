"""DeepSpeed's questions about the CPU, without py-cpuinfo's busy loop."""

import shutil
import sys
from types import SimpleNamespace

import pytest


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("lscpu"), reason="needs DeepSpeed and lscpu")
def test_the_answer_is_py_cpuinfos():
    import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder

    from hf_memopt.recipe.preflight import quick_cpu_info

    slow = cpuinfo.cpuinfo._get_cpu_info_from_proc_cpuinfo()  # one of its sources, without the busy loop
    builder, its_own = CPUAdamBuilder(), cpuinfo.get_cpu_info
    with quick_cpu_info(SimpleNamespace(deepspeed_plugin=None)):
        assert cpuinfo.get_cpu_info is its_own, "without DeepSpeed nothing is replaced"
    with quick_cpu_info(SimpleNamespace(deepspeed_plugin="a plugin")):
        assert cpuinfo.get_cpu_info is not its_own
        width = builder.simd_width()
        assert builder.cpu_arch()
    assert cpuinfo.get_cpu_info is its_own
    flags = slow.get("flags", [])
    wanted = "-D__AVX512__" if "avx512f" in flags else "-D__AVX256__" if "avx2" in flags else width
    assert width == wanted
