"""Plans with frozen weights in host memory: only where nothing else fits, and with as few of them as must be."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from test_plan import config, spec_for
from transformers import BitsAndBytesConfig

from hf_memopt import MemoryArguments, estimate, plan
from hf_memopt.estimator.overheads import context
from hf_memopt.estimator.result import Estimate
from hf_memopt.estimator.timing.step_time import host_link
from hf_memopt.estimator.training_fields import checkpointing_period
from hf_memopt.hardware import get_hardware
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.planner.choices import Choice, list_choices
from hf_memopt.planner.cost import Cost
from hf_memopt.planner.devices import resolve_preset
from hf_memopt.planner.search import Search
from hf_memopt.planner.streamed_weights import (
    lacks_memory,
    streaming_spec,
    weights_alone,
    what_lacks,
    with_host_memory,
)
from hf_memopt.units import GIB

QLORA = ("rtx_3060", "qlora")


def test_which_jobs_may_stream():
    spec = spec_for(config(1), "lora", hardware="rtx_3060")
    asked = streaming_spec(spec)
    shares = {choice.streamed for choice in list_choices(asked)}
    assert max(shares) == 1 and min(shares) > 0
    assert not any(choice.streamed for choice in list_choices(spec))
    assert all(choice.offloads and choice.memory_fields()["weight_streaming"] for choice in list_choices(asked))
    on = MemoryArguments(weight_streaming=True)
    for other in (
        spec_for(config(1), "full", hardware="rtx_3060"),
        spec_for(config(1), "lora"),  # a CPU
        spec_for(config(1), "lora", hardware="rtx_3060x2"),
        replace(spec, memory_args=on),
        replace(spec, task="dpo"),
        asked,
    ):
        assert streaming_spec(other) is None


def test_weights_alone_rule_out_methods():
    """Not where they are streamed, which made LoRA of a large model "too large" for its own setting."""
    spec = replace(spec_for(config(1), "lora", hardware="rtx_3060"), host_memory=HostMemory(GIB, "a small box"))
    (size, _), (in_4_bits, _) = weights_alone(spec), weights_alone(replace(spec, preset=resolve_preset(*QLORA)))
    assert in_4_bits == size // 4 > 0
    assert weights_alone(replace(spec, memory_args=MemoryArguments(weight_streaming=True))) is None
    full = spec_for(config(1), "full", hardware="rtx_3060")
    own = replace(full, training={})
    freed = replace(own, memory_args=MemoryArguments(optimizer_in_backward=True))
    every, dtype = weights_alone(full)[0], full.preset.dtype
    assert [weights_alone(other) for other in (full, own, freed, replace(own, frozen=("vision",)))] == [
        (every, f"{dtype} weights"),
        (2 * every, f"{dtype} weights and gradients"),
        (every, f"{dtype} weights"),
        (every, f"{dtype} weights"),
    ]
    budget = size // 2
    spec = replace(spec, memory=int(budget / 0.94), host_memory=HostMemory(size, "a small box"))
    assert not lacks_memory(spec)
    short = lacks_memory(replace(spec, host_memory=HostMemory(budget // 2, "a small box")))
    assert short.endswith("of its host may be used (a small box; --host-memory sets the limit)")


def test_traces_hold_whole_patterns_of_streamed_layers():
    half = MemoryArguments(weight_streaming=True, weight_streaming_ratio=0.5)
    assert checkpointing_period({}, half) == 2
    assert checkpointing_period({"activation_checkpointing_kwargs": {"every_n_layers": 3}}, half) == 6
    assert checkpointing_period({}, replace(half, checkpoint_ratio=0.25)) == 4


def test_plans_say_where_the_link_bounds_the_speed(monkeypatch):
    """A second for the weights, one way, and as long for the activations."""
    device = get_hardware("rtx_3060")
    job, size = SimpleNamespace(device=device), host_link(device)
    cost = Cost(SimpleNamespace(job=job, streamed_bytes=lambda choice: size, activations=lambda choice: size))
    monkeypatch.setattr(Cost, "_micro", lambda self, choice: 2.5)
    choice = Choice("none", 1, 1, 1.0, "adamw_torch", "bfloat16", streamed=1.0)
    assert cost.copying(choice) == 2 and cost.link_bound(choice) is None
    said = cost.link_bound(replace(choice, knobs=frozenset({"activation_offload"})))
    assert said.endswith("a micro-batch computes for 2.5 s, and its weights take 3 s to arrive")


def test_what_is_missing_is_host_memory():
    some = Choice("none", 1, 1, 1.0, "adamw_torch", "bfloat16", streamed=0.75)
    all_layers, found = replace(some, streamed=1.0), {}
    host = {some: 20 * GIB, all_layers: 26 * GIB}
    search = SimpleNamespace(
        choices=[],
        short_of_host=[all_layers, some],
        needs=lambda choice: 8 * GIB,
        host_bytes=host.get,
        estimates=found,
        host_memory=HostMemory(16 * GIB, "a small box"),
        estimate=lambda new: found.update({new[0]: Estimate(0, 0, 9 * GIB, 21 * GIB, "load", {}, {}, 0, {}, ())}),
    )
    spec = SimpleNamespace(memory_budget=10 * GIB)
    said = "needs about 20.00 GiB of host memory, of 16.00 GiB (a small box; --host-memory sets the limit)"
    assert what_lacks(search, 10 * GIB) == said
    assert with_host_memory(spec, search).text.startswith("--host-memory 21 (") and list(found) == [some]
    spec.memory_budget = 7 * GIB
    assert what_lacks(search, 7 * GIB) == "needs about 8.00 GiB with weights in host memory, of 7.00 GiB"
    assert with_host_memory(spec, search) is None


@pytest.mark.slow
def test_weights_are_streamed_where_nothing_else_fits(monkeypatch):
    """Not of all layers, where nine tenths of the weights have room; sketches stand for the estimates."""

    def by_sketch(search, new):
        for choice in new:
            size, host = int(search.needs(choice)), search.host_bytes(choice)
            search.estimates[choice] = Estimate(size, size, size, host, "forward", {}, {}, 2**40, {}, ())

    monkeypatch.setattr(Search, "estimate", by_sketch)
    # Of a large model the weights alone say so; beside a small one's CUDA's context takes more.
    monkeypatch.setattr("hf_memopt.planner.plan.excessive_weights", lambda spec: (2**62, "weights"))
    deep = config(12, hidden_size=4096, intermediate_size=16384, vocab_size=200)  # whose copies outlast the launches
    weights = 12 * (4 * 4096**2 + 3 * 4096 * 16384) * 2
    memory = int((context(get_hardware("rtx_3060")) + 0.9 * weights) / 0.94)
    settings = {"memory": memory, "training": {"optim": "adamw_torch"}, "lora": {"r": 2}}
    said: list[str] = []
    made = plan(deep, "rtx_3060", 1, 64, "lora", say=said.append, **settings)
    assert sum("tracing" in line for line in said) == 1  # nothing is searched with all weights on the device
    share = made.profiles[-1].choice.streamed
    assert 0 < share < 1
    assert made.rejected[0].settings == "LoRA, all weights on the device"
    answer = json.loads(json.dumps(made.to_dict()))
    assert answer["profiles"][-1]["memory_arguments"]["weight_streaming_ratio"] == share
    assert f"weights of {share:.0%} of the layers in host memory" in answer["profiles"][-1]["settings"]


@pytest.mark.slow
def test_8b_in_4_bits_needs_few_gib_of_a_card():
    memory = {"weight_streaming": True, "loss_chunk_size": 256, "mlp_tile_size": 512}
    fields = {
        "per_device_train_batch_size": 1,
        "bf16": True,
        "optim": "paged_adamw_8bit",
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }
    found = estimate(
        "llama-3.1-8b",
        fields,
        2048,
        "rtx_4090",
        LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
        dtype="bfloat16",
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        ),
        memory_args=MemoryArguments(**memory),
    )
    assert found.device_bytes <= 3.5 * GIB
