"""Cluster presets under every engine, predicted for the device that needs most: python benchmarks/clusters.py"""

from record import kept, record_each

from hf_memopt import MemoryArguments, get_preset
from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.preset_estimates import preset_job

# preset, method, strategies
JOBS = (
    ("h100_80gb_x8", "full", "ddp zero1 zero2 zero3 fsdp2 hsdp8 tp8 zero3_offload_cpu zero3_offload_nvme"),
    ("h100_80gb_x8", "lora", "zero3 fsdp2 hsdp8"),
    ("h100_80gb_x16_nodes", "full", "zero3 fsdp2 tp8 zero3_offload_cpu zero3_offload_nvme"),
)


def row_of(name: str, method: str, strategy: str) -> dict:
    preset = get_preset(name, method, strategy)
    row = {"preset": name, "method": method, "model": preset.reference_model, "tokens": preset.seq_len}
    row |= {"devices": preset.processes, "strategy": strategy}
    try:
        found = estimate_job(preset_job(preset, memory_args=MemoryArguments()))
    except InputError as error:
        return row | {"refused": str(error)}
    return row | kept(found, "device_bytes", "capacity_bytes", "host_bytes", "phase", "breakdown")


if __name__ == "__main__":
    jobs = ((name, method, strategy) for name, method, several in JOBS for strategy in several.split())
    record_each("clusters", row_of, jobs)
