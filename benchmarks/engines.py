"""Every engine's real processes against one process and against the estimate: python benchmarks/engines.py

Two and four processes of a small model over gloo. Losses are compared with those of one process at the same effective
batch, step by step; every rank's peak is that of its live tensors (engine_ranks.py), beside the estimate for that
rank. Where states or weights are offloaded, what is on the host counts too: on a CPU it is the same memory.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from record import record

MODEL = {
    **{"model_type": "llama", "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 352},
    **{"num_attention_heads": 4, "max_position_embeddings": 512, "vocab_size": 4000},
}
TOKENS, EFFECTIVE, STEPS = 64, 8, 3
# strategy -> numbers of processes
ENGINES = dict.fromkeys(("ddp", "zero1", "zero2", "zero3", "zero2_offload_cpu", "zero3_offload_cpu"), (2, 4))
ENGINES |= dict.fromkeys(("zero3_offload_nvme", "fsdp2", "fsdp2_offload_cpu", "hsdp2", "tp2"), (2, 4))
ENGINES["tp2_hsdp1"] = (4,)


def case(strategy: str, world_size: int, model: Path, **more) -> dict:
    """A case of engine_ranks.py at the effective batch."""
    from hf_memopt.engines import engine_named

    mesh = engine_named(strategy).mesh(world_size)
    batches = mesh.batches if mesh else world_size
    batches //= more.get("sequence_parallel", 1)
    fields = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": EFFECTIVE // (2 * batches)}
    fields |= {"max_steps": STEPS, "learning_rate": 1e-3}
    named = {"name": f"{strategy}-{world_size}", "strategy": strategy, "world_size": world_size}
    return {**named, "fields": fields, "seq_len": TOKENS, "model": str(model), **more}


def save_model(folder: Path, **config) -> Path:
    """Random weights, from which all begin."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODEL, **config)).save_pretrained(folder)
    return folder


def run(folder: Path, cases: list[dict]) -> dict[str, list[dict]]:
    """What every rank of every case told: name -> one row a rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "engine_ranks.py", folder],
        env=environment,
        capture_output=True,
        text=True,
        input="\n".join(map(json.dumps, cases)),
        timeout=1500,
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return {
        found["name"]: [
            json.loads((folder / found["name"] / f"{rank}.json").read_text()) for rank in range(found["world_size"])
        ]
        for found in cases
    }


def predicted(case: dict, rank: int | None = None) -> int:
    """Bytes that the estimate has for a rank of a case, on the device and, where the two are one, on the host."""
    from accelerate import ParallelismConfig
    from engine_ranks import deepspeed_config, qlora

    from hf_memopt import MemoryArguments
    from hf_memopt.estimator import estimate
    from hf_memopt.hardware import get_hardware
    from hf_memopt.hardware.constants import assumed

    fields = {name: value for name, value in case["fields"].items() if name not in ("max_steps", "learning_rate")}
    strategy = case["strategy"]
    if strategy.startswith("zero"):
        fields["deepspeed"], strategy = deepspeed_config(strategy, Path("/")), None
    if shared := case.get("sequence_parallel"):
        fields["parallelism_config"] = ParallelismConfig(sp_size=shared, sp_backend="deepspeed")
    quantization, adapters = qlora(case["strategy"]) if case.get("qlora") else (None, None)
    found = estimate(
        case["model"],
        fields,
        case["seq_len"],
        "cpu",
        dtype="float32",
        world_size=case["world_size"],
        rank=rank,
        strategy=strategy,
        peft_config=adapters,
        quantization_config=quantization,
        memory_args=MemoryArguments(oom_recovery=False, silent_mode=True, **case.get("memory", {})),
    )
    if "offload" not in case["strategy"]:
        return found.peak_allocated_bytes
    return found.host_bytes - int(assumed("host_process_bytes", get_hardware("cpu")).value)


def again(row: dict) -> dict:
    """What is predicted now, for every rank."""
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        one = case(row["strategy"], row["processes"], model)
        return {"predicted_bytes": [predicted(one, rank) for rank in range(row["processes"])]}


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = save_model(folder / "model")
        cases = [case(strategy, size, model) for strategy, sizes in ENGINES.items() for size in sizes]
        found = run(folder, [case("none", 1, model), *cases])
        alone = found["none-1"][0]["losses"]
        for one in cases:
            losses = found[one["name"]][0]["losses"]
            measured = [rank["tensors"] for rank in found[one["name"]]]
            estimates = [predicted(one, rank) for rank in range(one["world_size"])]
            errors = [guess / truth - 1 for guess, truth in zip(estimates, measured, strict=True)]
            apart = max(abs(here / there - 1) for here, there in zip(losses, alone, strict=True))
            rows.append(
                {
                    "strategy": one["strategy"],
                    "processes": one["world_size"],
                    "measured_bytes": measured,
                    "predicted_bytes": estimates,
                    "largest_error": round(max(errors, key=abs), 5),
                    "largest_loss_difference": float(f"{apart:.2g}"),
                }
            )
            print(rows[-1], flush=True)
    record("engines", rows)


if __name__ == "__main__":
    main()
