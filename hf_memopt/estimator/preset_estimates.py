"""The largest model that every preset is predicted to fit, and its memory; `make estimates` writes them to a file.

The file spares `hf-memopt show` the import of torch; a test estimates a part of it again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata

from hf_memopt.errors import InputError
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.spec_job import preset_spec, spec_job
from hf_memopt.estimator.tracing.model import count_weights
from hf_memopt.estimator.tracing.tasks import infer_task
from hf_memopt.files import write_whole
from hf_memopt.presets import METHODS, Preset, list_presets, preset_by_name
from hf_memopt.presets.build import is_chosen
from hf_memopt.presets.reference import REFERENCE_FILE

# The models that presets are for, the smallest first: of each size one that people fine-tune.
MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-360M",
    "Qwen/Qwen3-0.6B",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen3-1.7B",
    "meta-llama/Llama-3.2-3B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.1-70B",
)
FILL = 0.9  # share of the memory that a reference model may take
_KEPT = ("device_bytes", "peak_allocated_bytes", "host_bytes", "capacity_bytes", "phase", "fits")


def reference_estimate(preset: Preset) -> dict:
    """A preset's row of the file, without `largest`: its reference model's memory."""
    estimate = estimate_job(spec_job(preset_spec(preset))).to_dict()
    sizes = {"micro_batch": preset.micro_batch_size, "seq_len": preset.seq_len, "strategy": preset.strategy}
    return {"model": preset.reference_model, **sizes, **{name: estimate[name] for name in _KEPT}}


def largest_that_fits(preset: Preset, models: Sequence[str]) -> dict | None:
    """The reference_estimate() of the largest model that fits at a preset's settings; None where none does.

    Args:
        models: hub ids, the smallest first.
    """
    budget = FILL * preset.hardware.memory
    for model in reversed(models):
        candidate = replace(preset, reference_model=model)
        if _least_bytes(candidate) <= budget:
            row = reference_estimate(candidate)
            if row["device_bytes"] <= budget:
                return row
    return None


def _least_bytes(preset: Preset) -> float:
    """A lower bound of a preset's bytes on one device: a model that is too large by this is not traced."""
    config = load_config(preset.reference_model)
    weights = count_weights(config, infer_task(config))
    # Two bytes a logit, and four of its gradient.
    logits = 6 * preset.micro_batch_size * preset.seq_len * config.vocab_size
    if preset.method != "full":
        return weights * (0.5 if preset.method == "qlora" else 2) + logits
    gradients = 8 * weights + logits  # fp32 weights and their gradients
    return max(gradients, (10 if "8bit" in preset.training["optim"] else 16) * weights)


def preset_row(name: str, method: str) -> dict:
    """A preset's row of the file: on the model that the table names, or on the largest that fits, with a larger one
    that fits at micro-batch 1.

    Raises:
        InputError: no model fits.
    """
    preset = preset_by_name(name, method)
    if is_chosen(name, method):
        return reference_estimate(preset) | {"largest": None}
    row = largest_that_fits(preset, MODELS)
    if row is None:
        raise InputError(f"preset {name}, method {method}: no reference model fits; use a smaller micro_batch")
    larger = MODELS[MODELS.index(row["model"]) + 1 :] if preset.micro_batch_size > 1 else ()
    largest = largest_that_fits(replace(preset, micro_batch_size=1), larger)
    return row | {"largest": largest and {"model": largest["model"], "device_bytes": largest["device_bytes"]}}


def main() -> None:
    rows = {}
    for name in list_presets():
        for method in METHODS:
            rows[f"{name} {method}"] = preset_row(name, method)
            print(name, method, rows[f"{name} {method}"], flush=True)
    versions = {package: metadata.version(package) for package in ("torch", "transformers", "accelerate", "hf_memopt")}
    content = {"date": datetime.now(UTC).date().isoformat(), "versions": versions, "estimates": rows}
    write_whole(REFERENCE_FILE, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
