"""The README's table of cards, `estimate` and `plan` give the same bytes for the same question."""

import json
import re
import sys
from pathlib import Path

import pytest

from hf_memopt import MemoryArguments, plan
from hf_memopt.cli.estimate import settle_job
from hf_memopt.cli.settings import command_spec
from hf_memopt.estimator.api import estimate_job
from hf_memopt.estimator.architectures import load_config
from hf_memopt.estimator.spec_job import spec_job
from hf_memopt.job.spec import JobSpec
from hf_memopt.levers.arguments import PLAN_PROFILES
from hf_memopt.planner.choice_jobs import choice_job
from hf_memopt.planner.choices import Choice
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.presets import METHODS
from hf_memopt.units import GIB

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from docs_tables.cards import largest_method  # noqa: E402
from predictions import TOKENS, host_memory, smallest  # noqa: E402

MODEL, CARD = "llama-3.2-1b", "a100_80gb"


def by_estimate(method: str) -> int:
    """As a command line asks."""
    dtype = ["dtype=bfloat16"] if method == "full" else []
    settings = [
        "per_device_train_batch_size=1",
        "gradient_accumulation_steps=16",
        "activation_checkpointing=true",
        "optim=adamw_8bit",
        "loss_chunk_size=512",
        *dtype,
    ]
    spec = settle_job(command_spec(settings, model=MODEL, preset=CARD, method=method, seq_len=TOKENS))
    return estimate_job(spec_job(spec)).device_bytes


def by_plan(method: str) -> int:
    """The choice of a plan with the table's settings."""
    preset = resolve_preset(CARD, method)
    memory_args = MemoryArguments(loss_chunk_size=512)
    spec = JobSpec(
        model=MODEL,
        config=load_config(MODEL),
        preset=preset,
        memory=preset.hardware.memory,
        seq_len=TOKENS,
        effective_batch_size=16,
        memory_args=memory_args,
    )
    return estimate_job(choice_job(spec, Choice("none", 1, 16, 1.0, "adamw_8bit", "bfloat16"))).device_bytes


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_table_estimate_and_plan_agree(method, monkeypatch):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as presets do
    table = smallest("gpu", MODEL, method)["device_bytes"]
    assert by_estimate(method) == table
    assert by_plan(method) == table


def test_what_the_table_calls_tight_is_what_no_plan_fills():
    rows = json.loads((ROOT / "benchmarks" / "results" / "cards.json").read_text())["rows"]
    need = {(row["kind"], row["model"], row["method"]): row for row in rows if "model" in row}
    models = dict.fromkeys(model for _, model, _ in need)
    for card in (row for row in rows if "card" in row):
        for model in models:
            sizes = {method: need.get((card["kind"], model, method), {}).get("device_bytes") for method in METHODS}
            largest = next((size for size in sizes.values() if size and size <= card["capacity_bytes"]), 0)
            tight = "(tight)" in largest_method(sizes, None, capacity=card["capacity_bytes"])
            assert tight == (largest > PLAN_PROFILES["maximum"][1] * card["capacity_bytes"])
    for page in ("README.md", "docs/quickstart.md"):
        assert re.search(
            r"tight means above\s<!-- =plans.fills -->.*<!-- = --> of the card", (ROOT / page).read_text()
        )


@pytest.mark.slow
def test_a_plan_streams_weights_with_the_tables_host_memory_and_not_with_less():
    rows = json.loads((ROOT / "benchmarks" / "results" / "cards.json").read_text())["rows"]
    card = next(row for row in rows if row.get("card") == "rtx_3060")
    ((model, memory),) = card["host_memory"].items()
    assert host_memory(model, card["card"]) == memory  # nothing fits with what is assumed
    assert plan(model, card["card"], seq_len=TOKENS, method="qlora", host_memory=memory * GIB).profiles
