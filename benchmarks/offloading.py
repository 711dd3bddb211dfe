"""How much longer a step is predicted to take with offloading: python benchmarks/offloading.py

By the planner's cost model, on paper; nothing here is measured. Everything but the place of weights and states is the
same: micro-batch 1, all layers checkpointed.
"""

import dataclasses

from record import record

from hf_memopt.estimator.architectures import load_config
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.devices import preset_of
from hf_memopt.planner.plan import Request

# Column -> fields of the choice, drives of a machine.
ENGINES = {
    "host memory": ({"strategy": "zero3_offload_cpu"}, 1),
    "NVMe, 1 drive": ({"strategy": "zero3_offload_nvme"}, 1),
    "NVMe, 4 drives": ({"strategy": "zero3_offload_nvme"}, 4),
}
ONE_DEVICE = {"host memory": ({"optimizer_offloaded": True}, 1)}
# Of a choice: nothing but the place of weights and states differs.
PLAIN = {"micro_batch": 1, "checkpointed": 1.0, "optim": "adamw_torch_fused"}
PLAIN |= dict.fromkeys(("inputs_offloaded", "chunked_loss", "compressed"), False)
PLAIN |= dict.fromkeys(("activations_offloaded", "optimizer_offloaded"), False)
# model, hardware, tokens a sample, accumulation, strategy without offloading
JOBS = (
    ("llama-3.2-1b", "rtx_4090", 2048, (1, 8, 32), "none"),
    ("llama-3.1-8b", "a100_80gbx8", 4096, (1, 8, 32), "zero3"),
    ("llama-3.1-70b", "a100_80gbx8", 4096, (1, 8, 32), "zero3"),
)


def rows() -> list[dict]:
    """A row a job and accumulation, with the factor of each place."""
    made = []
    for model, hardware, tokens, windows, strategy in JOBS:
        preset, config = preset_of(hardware, "full"), load_config(model)
        request = Request(model, config, preset, 2**62, tokens, max(windows) * preset.processes)
        search = request.search(lambda text: print("   ", text, flush=True))
        alike = next(one for one in search.choices if one.strategy == strategy)
        for accumulation in windows:
            plain = dataclasses.replace(alike, **PLAIN, accumulation=accumulation)
            seconds = Cost(search.sketch).step(plain)
            factors = {
                name: Cost(search.sketch, drives).step(dataclasses.replace(plain, **changes)) / seconds
                for name, (changes, drives) in (ENGINES if preset.processes > 1 else ONE_DEVICE).items()
            }
            row = {"model": model, "hardware": hardware, "devices": preset.processes, "strategy": strategy}
            made.append(row | {"tokens_of_a_device": tokens * accumulation, "times_as_long": factors})
            print(made[-1], flush=True)
    return made


if __name__ == "__main__":
    record("offloading", rows())
