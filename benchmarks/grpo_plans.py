"""Plans of GRPO beside the settings that authors ran: python benchmarks/grpo_plans.py

A job is a published run of speed_generated.py: its model, devices, method, batch, groups and lengths. The author's
settings are estimated as they are; then plan() is asked for the same job, with micro-batch, checkpointing, strategy,
steps_per_generation and vLLM's share left open. Both figures are this package's own; nothing was measured. A reference
model (beta) beside a sharded one is not modelled: no run has one here.
"""

import json
from dataclasses import replace

from record import kept, record_each
from speed_generated import DATA

from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.plan import plan_job
from hf_memopt.planner.settle import settle

RUNS = (
    *("cookbook_vllm_512_run", "trl_nb_a100_40_qlora7b", "katago_sleep_off"),
    *("mini_r1_4xh100_3b", "coursia_8B_3080_160"),
)
FIGURES = ("device_bytes", "step_seconds", "capacity_bytes")
OPEN = ("steps_per_generation", "vllm_gpu_memory_utilization")


def asked(row: dict) -> JobSpec:
    """A run's job, with what a plan chooses left open."""
    samples = row["micro_batch"] * row["accumulation"] * row["processes"]
    training = {
        "num_generations": row["num_generations"],
        "max_completion_length": row["longest_completion_tokens"],
        **{name: value for name, value in row["fields"].items() if name not in OPEN},
    }
    return JobSpec(
        model=row["config"],
        hardware=f"{row['gpu']}x{row['processes']}" if row["processes"] > 1 else row["gpu"],
        method=row["method"],
        task="grpo",
        seq_len=row["prompt_tokens"] + row["longest_completion_tokens"],
        effective_batch_size=samples,
        training=training,
        lora=dict(row.get("lora") or {}),
    )


def author(row: dict) -> JobSpec:
    """The job with the author's own settings."""
    spec = asked(row)
    own = {
        "per_device_train_batch_size": row["micro_batch"],
        "gradient_accumulation_steps": row["accumulation"],
        "activation_checkpointing": row["checkpointing"],
        "steps_per_generation": row["steps_per_generation"],
        **row["fields"],
    }
    if "optim" in row:
        own["optim"] = row["optim"]
    settled = settle(spec, spec.method)
    preset = resolve_preset(spec.hardware, spec.method, row["strategy"])
    return replace(settled, preset=preset, strategy=None, training=settled.training | own, hardware=None)


def compared(row: dict) -> dict:
    """A row: the author's settings, and the plan's fastest."""
    theirs = estimate_job(spec_job(author(row)))
    profiles = plan_job(asked(row)).profiles
    best = min(profiles, key=lambda profile: profile.estimate.step_seconds)
    return {
        "id": row["id"],
        **{f"author_{name}": value for name, value in kept(theirs, *FIGURES).items()},
        "author_settings": theirs.estimated,
        **{f"plan_{name}": value for name, value in kept(best.estimate, *FIGURES).items()},
        "plan_settings": best.summary,
        "time": round(best.estimate.step_seconds / theirs.step_seconds, 4),
    }


def again(row: dict) -> dict:
    """What is planned now."""
    return compared(next(run for run in runs() if run["id"] == row["id"]))


def runs() -> list[dict]:
    """The published runs, in the order of RUNS."""
    rows = {row["id"]: row for row in json.loads(DATA.read_text(encoding="utf-8"))}
    return [rows[name] for name in RUNS]


if __name__ == "__main__":
    record_each("grpo_plans", compared, [(row,) for row in runs()])
