"""What plans make of four traces: bytes, seconds and order of every choice, from traces written by hand."""

import itertools
from collections import Counter
from dataclasses import replace

import frozen
import pytest
from transformers import AutoConfig

from hf_memopt.estimator.accounting.ledger import GENERATION, KINDS, Peak
from hf_memopt.estimator.accounting.work import Attention, Kernel
from hf_memopt.estimator.result import Estimate
from hf_memopt.hardware.host_memory import HostMemory
from hf_memopt.job.spec import JobSpec
from hf_memopt.planner.choice_jobs import baseline_jobs, choice_job
from hf_memopt.planner.choices import list_choices
from hf_memopt.planner.search import Search, summarize
from hf_memopt.planner.settle import settle
from hf_memopt.planner.sketch import Traced, make_sketch
from hf_memopt.units import GIB, MIB

SEGMENTS = ("load", "forward", "forward layer 1", "backward layer 2", "between", "optimizer", GENERATION)
LLAMA = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "vocab_size": 32000,
}
CONFIG = AutoConfig.for_model("llama", **LLAMA, num_key_value_heads=4, max_position_embeddings=1024)
ASKED = {
    "one card": {"hardware": "rtx_3070", "method": "full"},
    "one card, one micro-batch": {"hardware": "rtx_3070", "method": "full", "training": {"max_grad_norm": 0}},
    "one old card": {"hardware": "t4", "method": "qlora"},
    "four cards": {"hardware": "a100_80gbx4", "method": "full"},
    "two boxes": {"hardware": "h100_80gbx16", "method": "lora"},
    "unified memory": {"hardware": "apple_m2_16gb", "method": "lora"},
    "a processor": {"hardware": "cpu", "method": "full"},
    "streamed weights": {"hardware": "rtx_3060", "method": "lora", "streaming": True},
    "pairs": {"hardware": "rtx_4090", "method": "full", "task": "dpo"},
    "completions": {"hardware": "rtx_4090", "method": "lora", "task": "grpo"},
}


def trace(number: int) -> Traced:
    """The numbers are of no model: each kind, segment and trace has its own, and a second sample adds less than the
    first has."""
    checkpointed, samples = divmod(number, 2)
    peaks, growing = {}, {}
    for place, segment in enumerate(SEGMENTS, 3):
        kinds = {kind: MIB * (place * 7 + order * 13 + samples * (place + order)) for order, kind in enumerate(KINDS)}
        kinds["parameters"] = 900 * MIB
        kinds["activations"] = MIB * (500 * place + 300 * samples) // (1 + 2 * checkpointed)
        peaks[segment] = Peak(sum(kinds.values()), kinds, host=(40 + place) * MIB)
        growing[segment] = kinds["activations"] * 3 // 4
    size = 2 * 10**7 * (1 + samples) * (1 + checkpointed)
    kernels = {
        Kernel(False, 900 * size, size // 50, 2): 24,
        Kernel(False, 0, size // 20): 40,
        Kernel(False, 100 * size, size // 90, 0, Attention(64, 640, 2, samples == 1)): 12,
        Kernel(False, 3, 5): 30 + number,
        Kernel(True, 0, 10**8 + number): 17,
    }
    return Traced(peaks, growing, Counter(kernels))


def made(name: str, **more) -> tuple[JobSpec, Search]:
    """A search whose sketch is of hand-made traces."""
    asked = ASKED[name]
    micro = {} if asked.get("task") == "grpo" else {"per_device_train_batch_size": 2}
    batch = {"completions": 8, "four cards": 16, "two boxes": 64, "one card, one micro-batch": 2}.get(name, 6)
    spec = JobSpec(model=CONFIG, config=CONFIG, seq_len=640, effective_batch_size=batch, **asked, **more)
    spec = settle(replace(spec, training={**spec.training, **micro}), asked["method"])
    choices = list_choices(spec)
    jobs = baseline_jobs(spec, choices)
    traces = [trace(number) for number in range(4)]
    sketch = make_sketch(jobs, traces if len(jobs) == 4 else traces[:2])
    return spec, Search(choices, sketch, lambda choice: choice_job(spec, choice), lambda text: None, spec.host_memory)


@pytest.mark.parametrize("name", ASKED)
def test_bytes_and_seconds_of_every_choice(name):
    _, search = made(name)
    sketch, cost = search.sketch, search.cost
    found = {
        f"{choice.strategy}: {summarize(choice)}, {choice.optim} {choice.dtype}": [
            *sketch.device_bytes(choice),
            *sketch.device_bytes(choice, 2.5),
            sketch.host_bytes(choice),
            int(sketch.paged_bytes(choice)),
            int(sketch.streamed_bytes(choice)),
            int(sketch.activations(choice)),
            frozen.figures(cost.step(choice)),
            frozen.figures(cost.rank(choice)),
            cost.link_bound(choice) is not None,
        ]
        for choice in search.choices
    }
    frozen.check(f"traces_{name.replace(' ', '_').replace(',', '')}", found)


HOSTS = {
    "any": None,
    "assumed": HostMemory(GIB // 4, "a box"),
    "little": HostMemory(GIB // 4, "asked", assumed=False),
    "some": HostMemory(GIB, "asked", assumed=False),
}


@pytest.mark.parametrize("name", ["one card", "one old card", "four cards", "unified memory", "streamed weights"])
def test_what_is_estimated_and_picked_for_every_budget(name, monkeypatch):
    """Estimates are a little off the sketches, each choice's by its own share."""
    _, search = made(name)
    sketch, choices = search.sketch, list(search.seconds)
    shares = {choice: 0.9 + 0.02 * (n % 7) for n, choice in enumerate(sorted(choices, key=summarize))}
    estimates = []

    def estimate(jobs, map_fn):
        estimates.extend(map(summarize, jobs))
        for choice in jobs:
            size = int(sketch.device_bytes(choice)[0] * shares[choice])
            host = GIB // 2 + 5 * sketch.host_bytes(choice) // 4
            yield Estimate(size, size, size, host, "forward", {}, {}, None, {}, ())

    monkeypatch.setattr("hf_memopt.planner.search.estimate_jobs", estimate)
    found = {}
    sizes = sorted({int(search.needs(choice)) for choice in choices})
    budgets = [sizes[len(sizes) * part // 8] for part in (0, 1, 4, 6)]
    for host, budget in [*itertools.product(["any"], budgets), *itertools.product(list(HOSTS)[1:], budgets[1:2])]:
        known = search.sketch_bytes.copy()
        new = Search(choices, sketch, lambda choice: choice, lambda text: None, HOSTS[host], sketch_bytes=known)
        quick = new.sketched(budget)
        picks = new.fastest_for([int(budget * share) for share in (0.9, 1.0, 1.1, 1.4)])
        smallest = new.smallest()
        found[f"{host} {budget}"] = {
            "sketched": quick and summarize(quick),
            "picks": [choice and f"{choice.strategy}: {summarize(choice)}" for choice in picks],
            "smallest": smallest and summarize(smallest),
            "estimates": estimates.copy(),
            "needs": [int(new.needs(choice)) for choice in new.choices[::9]],
            "caution": new.caution,
            "short of host memory": len(new.short_of_host),
        }
        estimates.clear()
    frozen.check(f"picks_{name}".replace(" ", "_"), found)
