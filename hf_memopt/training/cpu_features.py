"""What DeepSpeed asks about the CPU whenever it loads an operator, answered once and at once."""


def answer_at_once() -> None:
    """Have py-cpuinfo's answer come from lscpu, as DeepSpeed does itself where py-cpuinfo fails.

    py-cpuinfo 9 asks the processor in a child of a child, for whose end it waits in a busy loop, twice for each
    operator and process: two processes on two cores have been seen to wait for minutes.
    """
    import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder

    builder = CPUAdamBuilder()
    found = builder._backup_cpuinfo() if builder.command_exists("lscpu") else None
    if found and found["arch"]:
        cpuinfo.get_cpu_info = lambda: found
