"""Predictions for lists of jobs: python benchmarks/predictions.py [cards] [clusters] [trl] [plans] [offloading]

Nothing here is measured. The jobs are data/predictions.toml; each list has a file in results/, and its tables in the
documentation: what runs on which card, cluster presets under every engine, TRL's trainers for a 7B model, what the
project's founding guides describe, as plans and as estimates beside what the guides say, and how much longer a step
takes with offloading.
"""

import re
import sys
import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path

from jobs import CHECKPOINTED, lora
from record import kept, record

from hf_memopt import MemoryArguments, estimate, get_hardware, get_preset, plan
from hf_memopt.errors import InputError
from hf_memopt.hardware import configure_allocator
from hf_memopt.hardware.host_memory import assumed_host_memory

JOBS = tomllib.loads((Path(__file__).parent / "data" / "predictions.toml").read_text(encoding="utf-8"))
TOKENS = JOBS["cards"]["tokens"]
PRESETS = {"gpu": "a100_80gb", "mps": "apple_m4_max_64gb"}  # whose settings stand for all cards of a kind
SMALLEST = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 16, **CHECKPOINTED}
FIELDS = {
    "fp32": {},
    "checkpointed": CHECKPOINTED,
    "bf16": {"bf16": True, **CHECKPOINTED},
    "fp16": {"fp16": True, **CHECKPOINTED},
    "bf16, all activations": {"bf16": True},
}


def predicted(preset, model: str, fields: dict, tokens: int, hardware, **more) -> dict:
    """What a row says of a model with a preset's adapters and quantization."""
    began = time.perf_counter()
    more |= {"peft_config": preset.peft_config()}
    more |= {"quantization_config": preset.model_kwargs().get("quantization_config")}
    try:
        found = estimate(model, fields, tokens, hardware, **more)
    except InputError as error:
        return {"refused": str(error)}
    sizes = kept(found, "device_bytes", "host_bytes", "peak_allocated_bytes", "breakdown", "phase")
    return sizes | {"seconds": round(time.perf_counter() - began, 1)}


def smallest(kind: str, model: str, method: str) -> dict:
    """The smallest settings of a method on a kind of device; streamed is QLoRA whose weights host memory holds."""
    preset = get_preset(PRESETS[kind], method="qlora" if method == "streamed" else method)
    fields = SMALLEST | ({} if kind == "mps" else {"optim": "adamw_8bit"})
    fields |= {"bf16": preset.precision == "bf16", "fp16": preset.precision == "fp16"}
    more = {"dtype": "bfloat16" if method == "full" else preset.dtype}
    more["memory_args"] = MemoryArguments(loss_chunk_size=512, weight_streaming=method == "streamed")
    row = {"kind": kind, "model": model, "method": method, "tokens": TOKENS}
    return row | predicted(preset, model, fields, TOKENS, preset.hardware, **more)


def cards():
    streamed = []
    for kind in PRESETS:
        for model in JOBS["cards"]["models"]:
            for method in ("full", "lora", "qlora", *(["streamed"] if kind == "gpu" else [])):
                row = smallest(kind, model, method)
                streamed += [row] if method == "streamed" else []
                yield row
    for name in JOBS["cards"]["cards"]:
        card = get_hardware(name)
        kind = "mps" if card.backend == "mps" else "gpu"
        host = assumed_host_memory(card).bytes
        row = {"card": name, "label": card.label, "kind": kind, "capacity_bytes": card.memory, "host_bytes": host}
        short = [job for job in streamed if job["device_bytes"] <= card.memory and job["host_bytes"] > host]
        yield row | {"host_memory": {job["model"]: host_memory(job["model"], name) for job in short if kind == "gpu"}}


def host_memory(model: str, card: str) -> int | None:
    """The --host-memory (GiB) with which a plan streams QLoRA's weights from there; None where it needs no more."""
    found = plan(model, card, seq_len=TOKENS, method="qlora")
    named = (re.match(r"--host-memory (\d+) ", change) for change in found.nearest)
    return next((int(match[1]) for match in named if match), None)


def clusters():
    for name, method, strategies in JOBS["clusters"]["jobs"]:
        for strategy in strategies.split():
            yield of_cluster(name, method, strategy)


def of_cluster(name: str, method: str, strategy: str) -> dict:
    """Of the device that needs most."""
    from hf_memopt.estimator.api import estimate_job
    from hf_memopt.estimator.spec_job import preset_spec, spec_job

    preset = get_preset(name, method, strategy)
    row = {"preset": name, "method": method, "model": preset.reference_model, "tokens": preset.seq_len}
    row |= {"devices": preset.processes, "strategy": strategy}
    try:
        found = estimate_job(spec_job(preset_spec(preset, memory_args=MemoryArguments())))
    except InputError as error:
        return row | {"refused": str(error)}
    return row | kept(found, "device_bytes", "capacity_bytes", "host_bytes", "phase", "breakdown")


def trl():
    for job in JOBS["trl"]["jobs"]:
        yield of_trl(*job)
    yield from ({"card": name, "capacity_bytes": get_hardware(name).memory} for name in JOBS["trl"]["cards"])


def of_trl(task: str, method: str, samples: int, tokens: int, fields: dict) -> dict:
    """With TRL's defaults for what a job does not say."""
    model = JOBS["trl"]["model"]
    row = {"model": model, "task": task, "method": method, "samples": samples, "tokens": tokens, "fields": fields}
    fields = {"per_device_train_batch_size": samples, **fields}
    preset = get_preset("a100_80gb", method=method)
    return row | predicted(preset, model, fields, tokens, "a100_80gb", dtype="bfloat16", task=task)


def plans():
    for job in JOBS["plans"]["jobs"]:
        yield planned(*job)
    for table in JOBS["guides"]:
        for row in table["rows"]:
            yield as_the_guide_says({**table, **row})
    # 405B by tensor parallelism 8 × pipeline 4 × data 4 with ZeRO-1, by arithmetic: a device holds a 32nd of weights
    # and gradients (bf16), and of that the 4th part of fp32 masters and states (12 bytes).
    share = 405.9e9 / (8 * 4)
    yield {"table": "split", "weights_bytes": 2 * share, "gradients_bytes": 2 * share, "states_bytes": 12 * share / 4}


def planned(title: str, model: str, hardware: str, seq_len: int, batch: int, method: str) -> dict:
    began = time.perf_counter()
    found = plan(model, hardware, batch, seq_len, method, say=lambda text: print("   ", text, flush=True))
    took = time.perf_counter() - began
    profiles = [
        {"profile": profile.name, "settings": profile.summary}
        | kept(profile.estimate, "device_bytes", "host_bytes", "breakdown")
        | {"relative_speed": round(profile.relative_speed, 3)}
        for profile in found
    ]
    row = {"table": "plan", "title": title, "model": model, "hardware": hardware, "method": method, "tokens": seq_len}
    row |= {"effective_batch_size": batch, "profiles": profiles, "rejected": [asdict(one) for one in found.rejected]}
    return row | kept(found, "missing_bytes", "nearest") | {"seconds": round(took, 1)}


def as_the_guide_says(job: dict) -> dict:
    """A guide's settings, estimated."""
    from transformers import AutoConfig

    model = job["model"] if isinstance(job["model"], str) else AutoConfig.for_model(**job["model"])
    fields = FIELDS[job["fields"]] | {name: job[name] for name in ("optim",) if name in job}
    fields |= {"per_device_train_batch_size": job["micro"]}
    fields |= {"gradient_accumulation_steps": job.get("accumulation", 1)}
    more = {"dtype": job.get("dtype", "float32")}
    if "devices" in job:
        more |= {"world_size": job["devices"], "strategy": job["strategy"]}
    if "frames" in job:
        more |= video(job)
    row = {name: job[name] for name in ("table", "title", "guide_gb", "hardware", "tokens")}
    found = estimate(model, fields, job["tokens"], job["hardware"], **more)
    row |= kept(found, "device_bytes", "peak_allocated_bytes", "phase", "breakdown", "capacity_bytes", "fits")
    if job["table"] == "ZeRO":
        row |= {"by_the_guides_bytes_gb": job["by_the_guides_bytes_gb"]}
        row |= {"deepspeeds_formula_bytes": deepspeeds_formula(job["strategy"])}
    return row


def video(job: dict) -> dict:
    """LoRA of a video model with a frozen tower, frames of 224 × 224."""
    from hf_memopt.video.inputs import VideoInputs
    from hf_memopt.video.processor import published_settings

    inputs = VideoInputs(job["frames"], max_pixels_per_frame=224 * 224, settings=published_settings(job["model"]))
    memory_args = MemoryArguments(logits_to_keep="dtype" in job)
    return {"peft_config": lora(16), "frozen": ("vision",), "memory_args": memory_args, "video": inputs}


def deepspeeds_formula(strategy: str) -> int | None:
    """DeepSpeed's own estimate of weights, gradients and states a device, for Llama-2-7B on 8; it has none below 2."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    weights, largest = 6_738_415_616, 32000 * 4096
    if strategy == "zero2":
        return int(estimate_zero2_model_states_mem_needs(weights, 8, 1, cpu_offload=False)[1])
    if strategy == "zero3":
        return int(estimate_zero3_model_states_mem_needs(weights, largest, 8, 1, False, False, True)[1])
    return None


def offloading():
    for job in JOBS["offloading"]["jobs"]:
        yield from of_offloading(*job)


def of_offloading(model: str, hardware: str, tokens: int, windows: list[int], strategy: str):
    """By the planner's cost model, on paper: nothing but the place of weights and states differs."""
    from hf_memopt.job.spec import JobSpec
    from hf_memopt.planner.choice_jobs import start_search
    from hf_memopt.planner.cost import Cost
    from hf_memopt.planner.settle import settle

    def of_choice(choice, changes: dict):
        return replace(choice, **{name: frozenset(at) if name == "knobs" else at for name, at in changes.items()})

    data = JOBS["offloading"]
    spec = settle(JobSpec(model=model, hardware=hardware, seq_len=tokens), "full")
    preset = spec.preset
    spec = replace(spec, memory=2**62, host_memory=None, effective_batch_size=max(windows) * preset.processes)
    search = start_search(spec, lambda text: print("   ", text, flush=True))
    alike = next(one for one in search.choices if one.strategy == strategy)
    for accumulation in windows:
        plain = of_choice(alike, data["plain"] | {"accumulation": accumulation})
        seconds = Cost(search.sketch).step(plain)
        factors = {
            name: Cost(search.sketch, place["drives"]).step(of_choice(plain, place["choice"])) / seconds
            for name, place in data["several" if preset.processes > 1 else "one_device"].items()
        }
        row = {"model": model, "hardware": hardware, "devices": preset.processes, "strategy": strategy}
        yield row | {"tokens_of_a_device": tokens * accumulation, "times_as_long": factors}


def again(row: dict) -> dict:
    """What is predicted now for a row of cards, clusters, trl, offloading, or of a guide."""
    configure_allocator()
    if "kind" in row:
        now = smallest(row["kind"], row["model"], row["method"])
    elif "times_as_long" in row:
        job = next(job for job in JOBS["offloading"]["jobs"] if job[:2] == [row["model"], row["hardware"]])
        now = next(one for one in of_offloading(*job) if one["tokens_of_a_device"] == row["tokens_of_a_device"])
    elif "preset" in row:
        now = of_cluster(row["preset"], row["method"], row["strategy"])
    elif "task" in row:
        now = of_trl(*(row[name] for name in ("task", "method", "samples", "tokens", "fields")))
    else:
        guides = [{**table, **one} for table in JOBS["guides"] for one in table["rows"]]
        now = as_the_guide_says(
            next(one for one in guides if (one["table"], one["title"]) == (row["table"], row["title"]))
        )
    return {name: value for name, value in now.items() if name != "seconds"}


TABLES = {"cards": cards, "clusters": clusters, "trl": trl, "plans": plans, "offloading": offloading}


def main(names: list[str]) -> None:
    configure_allocator()  # the jobs run as presets' commands start them
    for name in names or TABLES:
        rows = []
        for row in TABLES[name]():
            rows.append(row)
            print(str(row)[:300], flush=True)
        record(name, rows, f"python benchmarks/predictions.py {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
