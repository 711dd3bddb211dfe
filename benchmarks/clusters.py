"""Cluster presets under every engine, predicted for the device that needs most: python benchmarks/clusters.py"""

from record import record

# preset, method, strategies
ROWS = (
    (
        "h100_80gb_x8",
        "full",
        ("ddp", "zero1", "zero2", "zero3", "fsdp2", "hsdp8", "tp8", "zero3_offload_cpu", "zero3_offload_nvme"),
    ),
    ("h100_80gb_x8", "lora", ("zero3", "fsdp2", "hsdp8")),
    ("h100_80gb_x16_nodes", "full", ("zero3", "fsdp2", "tp8", "zero3_offload_cpu", "zero3_offload_nvme")),
)


def main() -> None:
    from hf_memopt import MemoryArguments, get_preset
    from hf_memopt.errors import InputError
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.preset_estimates import preset_job

    rows = []
    for name, method, strategies in ROWS:
        for strategy in strategies:
            preset = get_preset(name, method, strategy)
            row = {
                "preset": name,
                "method": method,
                "model": preset.reference_model,
                "tokens": preset.seq_len,
                "devices": preset.processes,
                "strategy": strategy,
            }
            try:
                found = estimate_job(preset_job(preset, memory_args=MemoryArguments()))
            except InputError as error:
                rows.append({**row, "refused": str(error)})
                continue
            kept = ("device_bytes", "capacity_bytes", "host_bytes", "phase", "breakdown")
            rows.append({**row, **{name: getattr(found, name) for name in kept}})
            print(rows[-1], flush=True)
    record("clusters", "python benchmarks/clusters.py", rows)


if __name__ == "__main__":
    main()
