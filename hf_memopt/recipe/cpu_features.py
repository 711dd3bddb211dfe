"""Facts about the CPU that DeepSpeed asks for whenever it loads an operator, answered at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def quick_cpu_info(args) -> Iterator[None]:
    """While it lasts, py-cpuinfo's answer comes from lscpu, as DeepSpeed does itself where py-cpuinfo fails.

    py-cpuinfo 9 asks the processor in a child of a child, for whose end it waits in a busy loop, twice for each
    operator and process: two processes on two cores have been seen to wait for minutes. lscpu's answer has only the
    fields that DeepSpeed reads, so nobody else in the process may get it for longer than DeepSpeed is at work. It can
    go when DeepSpeed (0.19.8) asks once, or py-cpuinfo without a busy loop.

    Args:
        args: TrainingArguments; without DeepSpeed nothing is replaced.
    """
    info = _from_lscpu() if args.deepspeed_plugin is not None else None
    if not info or not info["arch"]:
        yield
        return
    import cpuinfo

    with mock.patch.object(cpuinfo, "get_cpu_info", lambda: info):
        yield


def _from_lscpu() -> dict | None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    return builder._backup_cpuinfo() if builder.command_exists("lscpu") else None
